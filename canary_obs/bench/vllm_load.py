"""`canary-obs bench vllm-load`: what the canary costs a vLLM whose pool is long in use, load by load."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.bench.engine_process import EngineProcess
from canary_obs.bench.environment import environment
from canary_obs.bench.load_figures import CONTROL, LOG, NONE, LoadFigures
from canary_obs.bench.result import BenchResult
from canary_obs.bench.vllm_workloads import WORKLOADS, LoadPlan
from canary_obs.engines.toolkit.service_process import ServiceProcess, free_port
from canary_obs.errors import ConfigurationError

BATCH = "batch"  # the load that stands for all of `batches`
LOADS = (*WORKLOADS, BATCH)
# Least throughput with / without.
_GOALS = {"decode": 0.999, "prefill": 0.999, "mixed": 0.998, "single": 0.998, "short": 0.995}
_HOST_BOUND_GOAL = 0.97  # in every load of a model so small that the host is the limit
_END_SECONDS = 20.0  # for report, flips and the engines' end


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLoadPlan:
    """The engines, and the rounds in which each runs every load."""

    shape: str
    runner: str  # v1, v2
    load: LoadPlan
    names: tuple[str, ...]  # of LOADS
    batches: tuple[int, ...]  # requests of the steady batches, whose host time is measured
    rounds: int
    seconds: float | None  # for everything; when they do not suffice there are fewer rounds
    memory: float  # share of the GPU's memory that must be free for each engine
    control: bool  # whether a third engine without a canary shows what the comparison itself gets wrong
    seed: int


def run_vllm_load(plan: VllmLoadPlan, on_progress: Callable[[dict[str, Any]], None]) -> BenchResult:
    """Start the engines together; then each runs every load in each round, in random order.

    `on_progress` receives the figures so far, marked `unfinished`, after each round. Raises EngineEnded, and
    ConfigurationError for a plan that cannot be run.
    """
    check_plan(plan)
    begun = time.monotonic()
    names = [NONE, LOG, *([CONTROL] if plan.control else [])]
    figures: dict[str, Any] = {"bench": "vllm-load", "plan": asdict(plan), "environment": environment()}
    goals = _GOALS if plan.shape == "8b" else dict.fromkeys(_GOALS, _HOST_BOUND_GOAL)
    runs = LoadFigures(plan.seed, goals)
    with TemporaryDirectory() as folder, ExitStack() as opened:
        endpoint = f"ipc://{folder}/service.sock"
        opened.callback(ServiceProcess.start(endpoint, free_port()).stop)
        engines = {name: opened.enter_context(start_engine(plan, name, endpoint)) for name in names}
        for engine in engines.values():
            figures |= engine.answer()
        figures["started_seconds"] = round(time.monotonic() - begun, 1)
        for number in rounds_in_time(plan.rounds, plan.seconds, begun):
            _run_round(plan, engines, number, runs)
            if number:
                figures |= runs.figures()
                on_progress(figures | {"unfinished": f"{number} of {plan.rounds} rounds, nothing checked"})
        canary = figures["canary"] = engines[LOG].ask("report", 0)
        figures["flips"] = engines[LOG].ask("flips", plan.seed)
    figures["all_seconds"] = round(time.monotonic() - begun, 1)
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
        measures=runs.measures(),
    )


def check_plan(plan: VllmLoadPlan) -> None:
    """Raises ConfigurationError for a plan that cannot be run."""
    if unknown := set(plan.names) - set(LOADS):
        raise ConfigurationError(
            "--loads", ", ".join(sorted(unknown)), f"known are {', '.join(LOADS)}", "Name some of them."
        )
    if (most := max(plan.load.requests, *plan.batches)) > plan.load.prefill:
        rule = f"a step of {most} requests has a token of each"
        raise ConfigurationError(
            "--prefill", plan.load.prefill, rule, "Give a larger one, or smaller batches."
        )


def rounds_in_time(rounds: int, seconds: float | None, begun: float) -> Iterator[int]:
    """Their numbers, while there is time for another; round 0 warms up and does not count, round 1 always is.

    `begun` is the `time.monotonic()` from which the seconds count.
    """
    longest = 0.0
    for number in range(rounds + 1):
        started = time.monotonic()
        needed = started - begun + longest + _END_SECONDS
        if seconds is not None and number > 1 and needed > seconds:
            return
        yield number
        longest = max(longest, time.monotonic() - started)


def _run_round(plan: VllmLoadPlan, engines: dict[str, EngineProcess], number: int, runs: LoadFigures) -> None:
    draw = random.Random(plan.seed + number)
    for name in plan.names:
        if name == BATCH:  # only the canary's own clocks are read in these
            loads, order = [f"batch-{count}" for count in plan.batches], [LOG]
        else:
            loads, order = [name], draw.sample(list(engines), len(engines))
        for load in loads:
            for engine in order:
                answer = engines[engine].ask(load, plan.seed + number)
                if number:
                    runs.add(load, engine, answer)


def start_engine(
    plan: VllmLoadPlan, name: str, endpoint: str, *, kernels_apart: bool = False
) -> EngineProcess:
    """An engine, of which LOG has a canary; on a CPU its kernels may have a clock of their own."""
    settings = {key: asdict(plan)[key] for key in ("shape", "load", "batches", "memory", "seed")}
    settings["kernels_apart"] = kernels_apart
    # Two engines that start together must not write the same files of compiled code.
    cache = os.environ.get("VLLM_CACHE_ROOT") or Path("~/.cache/vllm").expanduser()
    environ = {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if plan.runner == "v2" else "0",
        "VLLM_CACHE_ROOT": str(Path(cache, "kv-canary-bench", name)),
    }
    if name == LOG:
        environ |= {"KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": endpoint}
    return EngineProcess("canary_obs.bench.vllm_load_engine", settings, environ)
