"""`canary-obs bench vllm-load`: what the canary costs a vLLM whose pool is long in use, load by load."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.bench.engine_process import EngineProcess
from canary_obs.bench.environment import environment
from canary_obs.bench.result import BenchResult, Measure
from canary_obs.bench.statistics import overhead_measure, paired_overhead
from canary_obs.bench.vllm_workloads import WORKLOADS, LoadPlan
from canary_obs.engines.toolkit.service_process import ServiceProcess, free_port

GOAL = 0.005  # of the time without a canary
_NONE, _LOG, _CONTROL = "none", "log", "control"  # engines; the control has no canary either


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLoadPlan:
    """The engines, and the rounds in which each runs every load."""

    shape: str
    runner: str  # v1, v2
    load: LoadPlan
    rounds: int
    memory: float  # share of the GPU's memory that each engine may use
    control: bool  # whether a third engine without a canary shows what the comparison itself gets wrong
    seed: int


def run_vllm_load(plan: VllmLoadPlan, on_progress: Callable[[dict[str, Any]], None]) -> BenchResult:
    """Start the engines one after the other; then each runs every load in each round, in random order.

    `on_progress` receives the figures so far, marked `unfinished`, after each round. Raises EngineEnded.
    """
    names = [_NONE, _LOG, *([_CONTROL] if plan.control else [])]
    figures: dict[str, Any] = {"bench": "vllm-load", "plan": asdict(plan), "environment": environment()}
    runs = _Runs(names)
    draw = random.Random(plan.seed)
    with TemporaryDirectory() as folder, ExitStack() as opened:
        endpoint = f"ipc://{folder}/service.sock"
        opened.callback(ServiceProcess.start(endpoint, free_port()).stop)
        engines: dict[str, EngineProcess] = {}
        for name in names:
            engines[name] = opened.enter_context(_engine(plan, endpoint if name == _LOG else None))
            figures |= engines[name].answer()
        for number in range(plan.rounds + 1):
            for load in WORKLOADS:
                for name in draw.sample(names, len(names)):
                    answer = engines[name].ask(load, plan.seed + number)
                    if number:  # the first round warms up
                        runs.add(load, name, answer)
            if number:
                figures |= runs.figures(plan.seed)
                on_progress(figures | {"unfinished": f"{number} of {plan.rounds} rounds, nothing checked"})
        figures["canary"] = engines[_LOG].ask("report", 0)
        figures["flips"] = engines[_LOG].ask("flips", plan.seed)
    canary = figures["canary"]
    return BenchResult(
        bench="vllm-load",
        title="Loads of a vLLM whose pool has long been in use, with the canary at its defaults and without",
        plan=asdict(plan),
        figures=figures,
        faults={
            "violations": canary["violations"],
            "observer_faults": canary["observer_faults"],
            "not_ok": canary["state"] if canary["state"] != ["ok"] else [],
            "nothing_compared_before_a_write": not canary["hashed"]["head"],
            "flips": figures["flips"]["incomplete"],
        },
        measures=runs.measures(plan.seed),
    )


class _Runs:
    """Seconds of each load on each engine, round by round."""

    def __init__(self, engines: list[str]) -> None:
        self._seconds: dict[str, dict[str, list[float]]] = {
            load: {engine: [] for engine in engines} for load in WORKLOADS
        }
        self._hooks: dict[str, dict[str, list[float]]] = {load: {} for load in WORKLOADS}

    def add(self, load: str, engine: str, answer: dict[str, Any]) -> None:
        self._seconds[load][engine].append(answer["seconds"])
        for hook, share in answer["host_share"].items():
            self._hooks[load].setdefault(hook, []).append(share)

    def figures(self, seed: int) -> dict[str, Any]:
        """Per load: overhead, that of the control, seconds, and the share of the time in each hook."""
        found = {}
        for load, seconds in self._seconds.items():
            found[load] = {
                "overhead": paired_overhead(self._pairs(load, _LOG), 1, seed),
                "control": paired_overhead(self._pairs(load, _CONTROL), 1, seed)
                if _CONTROL in seconds
                else None,
                "seconds": {name: [round(each, 4) for each in column] for name, column in seconds.items()},
                "host_share": {hook: round(fmean(share), 5) for hook, share in self._hooks[load].items()},
            }
        return {"loads": found}

    def measures(self, seed: int) -> dict[str, Measure]:
        """The overhead of each load; what the control differs by is noise as well."""
        found = {}
        for load, figures in self.figures(seed)["loads"].items():
            measure = overhead_measure(figures["overhead"], GOAL)
            control = 0.0 if figures["control"] is None else abs(figures["control"]["overhead"])
            found[load] = replace(measure, noise=max(measure.noise, control))
        return found

    def _pairs(self, load: str, other: str) -> list[tuple[float, float]]:
        seconds = self._seconds[load]
        return list(zip(seconds[_NONE], seconds[other], strict=True))


def _engine(plan: VllmLoadPlan, endpoint: str | None) -> EngineProcess:
    """With a service's endpoint it has a canary."""
    settings = {name: value for name, value in asdict(plan).items() if name not in ("rounds", "control")}
    environ = {"VLLM_USE_V2_MODEL_RUNNER": "1" if plan.runner == "v2" else "0"}
    if endpoint is not None:
        environ |= {"KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": endpoint}
    return EngineProcess("canary_obs.bench.vllm_load_engine", settings, environ)
