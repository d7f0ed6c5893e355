"""`canary-obs bench sglang-gpu`: what the canary costs an SGLang, load by load, and what its own costs."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.bench.engine_process import EngineProcess
from canary_obs.bench.environment import environment
from canary_obs.bench.load_figures import LOG, NONE, LoadFigures, host_measures
from canary_obs.bench.result import BenchResult, Measure
from canary_obs.bench.sglang_loads import LOADS, SglangLoads
from canary_obs.bench.statistics import overhead_measure, paired_overhead
from canary_obs.bench.step_log import Answer
from canary_obs.engines.toolkit.service_process import ServiceProcess, free_port
from canary_obs.errors import ConfigurationError, UnsupportedEngine

# By engine: arguments of SGLang. Those of its own canary are named as it names what it compares.
ENGINES: dict[str, dict[str, Any]] = {
    NONE: {},
    LOG: {},
    "sglang-none": {"kv_canary": "log", "kv_canary_real_data": "none"},
    "sglang-partial": {"kv_canary": "log", "kv_canary_real_data": "partial"},
    "sglang-all": {"kv_canary": "log", "kv_canary_real_data": "all"},
    "sglang-sweep": {"kv_canary": "log", "kv_canary_real_data": "all", "kv_canary_sweep_interval": 32},
}
_GOALS = {"decode": 0.003, "few": 0.003, "single": 0.003, "prefill": 0.005, "mixed": 0.005}
_STEADY = "decode", "few", "single"  # loads of equal steps
_HOST_BOUND_GOAL = 0.05  # of every load of a model so small that the host is the limit
_LONGER_STEP_GOAL_MS = 2.0  # by which a sweep may lengthen a step
_DRAFTS_LEFT_OUT = "of KV bytes protected", "layers of draft models"  # in reasons of a state
_ENTRY_POINTS = "[sglang.srt.plugins]\nkv_canary_bench = canary_obs.bench.sglang_taps:register\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangGpuPlan:
    """The engines, and the rounds in which each runs every load."""

    shape: str
    engines: tuple[str, ...]  # of ENGINES; `none` and `log` among them
    loads: SglangLoads
    names: tuple[str, ...]  # of LOADS
    tokens: int  # in the pool of each engine
    rounds: int
    seed: int
    one_engine: bool = False  # `none` is the engine of `log`, without its canary
    drafts: bool = False  # of a model of one layer, three tokens ahead; their KV may be left out
    verify_on_hit: bool = False  # the canary compares prefix hits, which is off by default


def run_sglang_gpu(plan: SglangGpuPlan, on_progress: Callable[[dict[str, Any]], None]) -> BenchResult:
    """Start the engines together; then each runs every load in each round, in random order.

    With `one_engine` the canary is attached and detached in turn, and its pool written after that.

    `on_progress` receives the figures so far, marked `unfinished`, after each round. Raises EngineEnded, and
    ConfigurationError for a plan without the engines that are compared.
    """
    _check(plan)
    figures: dict[str, Any] = {"bench": "sglang-gpu", "plan": asdict(plan), "environment": environment()}
    runs, draw = _Runs(plan), random.Random(plan.seed)
    with TemporaryDirectory() as folder, ExitStack() as opened:
        plugin = Path(folder, "kv_canary_bench-0.dist-info")
        plugin.mkdir()
        (plugin / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: kv-canary-bench\nVersion: 0\n", "utf-8"
        )
        (plugin / "entry_points.txt").write_text(_ENTRY_POINTS, "utf-8")
        endpoint = f"ipc://{folder}/service.sock"
        opened.callback(ServiceProcess.start(endpoint, free_port()).stop)
        own = [name for name in plan.engines if not (plan.one_engine and name == NONE)]
        engines = {name: opened.enter_context(_engine(plan, name, folder, endpoint)) for name in own}
        figures["engines"] = {name: engine.answer()["engine"] for name, engine in engines.items()}
        shared = SharedEngine(engines[LOG]) if plan.one_engine else None
        for number in range(plan.rounds + 1):
            for load, name in _order(plan, draw):
                if shared is not None and name in (NONE, LOG):
                    shared.have(attached=name == LOG, seed=plan.seed + number)
                answer = engines[LOG if plan.one_engine and name == NONE else name].ask(
                    load, plan.seed + number
                )
                if number:  # the first round warms up
                    runs.add(load, name, answer)
            if number:
                figures |= runs.figures()
                on_progress(figures | {"unfinished": f"{number} of {plan.rounds} rounds, nothing checked"})
        if shared is not None:
            shared.have(attached=True, seed=plan.seed)
        canary = figures["canary"] = engines[LOG].ask("report", 0)
        protected = canary["protected"]
        flips = figures["flips"] = engines[LOG].ask("flips", plan.seed) if protected else {}
        reports = figures["reports"] = [] if shared is None else shared.reports
    return BenchResult(
        bench="sglang-gpu",
        title="Loads of an SGLang with the canary at its defaults, with SGLang's own canary, and without",
        plan=asdict(plan),
        figures=figures,
        faults={
            "not_protected": not protected and canary["refusal"],
            "violations": protected and sum(each["violations"] for each in (canary, *reports)),
            "observer_faults": protected and sum(each["observer_faults"] for each in (canary, *reports)),
            "not_ok": protected and _not_ok([each["state"] for each in (canary, *reports)], plan),
            "no_hits_compared": protected and _no_hits(plan, (canary, *reports)),
            "flips": protected
            and (flips["slot_named"] != flips["flips"] or flips["other_violations"])
            and flips,
        },
        measures=runs.measures(),
    )


def _no_hits(plan: SglangGpuPlan, reports: Sequence[Answer]) -> bool:
    """Whether prefix hits were to be compared, and none was."""
    return plan.verify_on_hit and not any(each["hashed"]["hit"] for each in reports)


def _not_ok(states: list[list[str]], plan: SglangGpuPlan) -> list[list[str]]:
    """States with their reasons, but for layers of draft models that are left out."""
    known = _DRAFTS_LEFT_OUT if plan.drafts else ()
    return [
        state
        for state in states
        if state != ["ok"]
        and (state[0] != "degraded" or any(not any(part in why for part in known) for why in state[1:]))
    ]


def _check(plan: SglangGpuPlan) -> None:
    for given, known, needed in (
        (plan.engines, tuple(ENGINES), (NONE, LOG)),
        (plan.names, tuple(LOADS), ()),
    ):
        if set(given) - set(known) or set(needed) - set(given):
            raise ConfigurationError(
                "bench sglang-gpu", ", ".join(given), f"known are {', '.join(known)}",
                f"Name some of them{f', {NONE} and {LOG} among them' if needed else ''}.",
            )  # fmt: skip


def _order(plan: SglangGpuPlan, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Loads and engines of a round. Attaching takes longer than a load: one engine runs all of them then."""
    if plan.one_engine:
        for name in draw.sample(plan.engines, len(plan.engines)):
            yield from ((load, name) for load in plan.names)
        return
    for load in plan.names:
        yield from ((load, name) for name in draw.sample(plan.engines, len(plan.engines)))


class SharedEngine:
    """An engine that has its canary in turn; each that is detached reports what it found."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine, self._attached = engine, True
        self.reports: list[Answer] = []

    def have(self, *, attached: bool, seed: int) -> None:
        """From now on the canary is attached, or is not; its pool was written since.

        Raises UnsupportedEngine when there was none, or it could not be attached again.
        """
        if attached is self._attached:
            return
        self._attached = attached
        if attached:
            self._protected(self._engine.ask("attach", seed))
        else:
            self.reports.append(self._protected(self._engine.ask("report", 0)))
            self._engine.ask("detach", seed)

    def _protected(self, answer: Answer) -> Answer:
        if not answer["protected"]:
            raise UnsupportedEngine(f"the engine of the bench has no canary: {answer['refusal']}")
        return answer


class _Runs:
    """Answers of each load on each engine, round by round."""

    def __init__(self, plan: SglangGpuPlan) -> None:
        self._plan = plan
        self._answers: dict[str, dict[str, list[Answer]]] = {
            load: {engine: [] for engine in plan.engines} for load in plan.names
        }
        self._steps = LoadFigures(plan.seed, {})

    def add(self, load: str, engine: str, answer: Answer) -> None:
        self._steps.add(load, engine, answer)
        each_step = "itl_ms", "host_us"  # whose percentiles are shown
        self._answers[load][engine].append({key: answer[key] for key in answer if key not in each_step})

    def figures(self) -> dict[str, Any]:
        """Per load: overhead of each engine over the one without a canary, percentiles, and all answers."""
        steps = self._steps.figures()["loads"]
        found = {}
        for load, answers in self._answers.items():
            found[load] = {
                "overhead": {
                    engine: paired_overhead(self._pairs(load, engine), 1, self._plan.seed)
                    for engine in self._plan.engines
                    if engine != NONE
                },
                "answers": answers,
                **steps[load],
            }
        return {"loads": found}

    def measures(self) -> dict[str, Measure]:
        """Our overhead, host time; how much longer a step is under a sweep than the longest without."""
        found = {}
        steps = self._steps.figures()["loads"]
        for load in self._plan.names:
            goal = _GOALS.get(load) if self._plan.shape == "8b" else _HOST_BOUND_GOAL
            found[load] = overhead_measure(paired_overhead(self._pairs(load, LOG), 1, self._plan.seed), goal)
            if load in _STEADY and steps[load]["host_us"]:
                found |= host_measures(load, steps[load]["host_us"], goals={})
            if load == "sweep":
                ours, plain = (self._answers[load][name] for name in (LOG, NONE))
                longer = [
                    mine["longest_swept_ms"] - other["longest_ms"]
                    for mine, other in zip(ours, plain, strict=True)
                ]
                found["sweep: longest step, more milliseconds"] = Measure(
                    value=round(max(longer), 3), noise=round((max(longer) - min(longer)) / 2, 3),
                    goal=_LONGER_STEP_GOAL_MS,
                )  # fmt: skip
                found[load] = replace(found[load], goal=None)  # the checks of the sweep are wanted work
        return found

    def _pairs(self, load: str, other: str) -> list[tuple[float, float]]:
        answers = self._answers[load]
        return [
            (plain["seconds"], mine["seconds"])
            for plain, mine in zip(answers[NONE], answers[other], strict=True)
        ]


def _engine(plan: SglangGpuPlan, name: str, folder: str, endpoint: str) -> EngineProcess:
    settings = {
        "shape": plan.shape, "loads": asdict(plan.loads), "tokens": plan.tokens, "more": ENGINES[name],
        "drafts": plan.drafts,
    }  # fmt: skip
    paths = [folder, *_own_folders(), os.environ.get("PYTHONPATH", "")]
    environ = {"PYTHONPATH": os.pathsep.join(paths)}
    if name == LOG:
        environ |= {"KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": endpoint}
        environ["KV_CANARY_VERIFY_ON_HIT"] = str(plan.verify_on_hit).lower()
    return EngineProcess("canary_obs.bench.sglang_engine", settings, environ)


def _own_folders() -> Sequence[str]:
    """Where this package and its kernels are imported from: the engine's processes start elsewhere."""
    import canary_kernels
    import canary_obs

    return [str(Path(str(package.__file__)).parents[1]) for package in (canary_obs, canary_kernels)]
