"""`canary-obs bench vllm-host`: host time of the canary's hooks per steady decode step of a real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.bench.environment import environment
from canary_obs.bench.kernel_clock import KERNELS, without_kernels
from canary_obs.bench.load_figures import HOST_GOALS_US, LOG, host_figures, host_measures
from canary_obs.bench.result import BenchResult
from canary_obs.bench.step_log import Answer
from canary_obs.bench.vllm_load import VllmLoadPlan, check_plan, start_engine
from canary_obs.engines.toolkit.service_process import ServiceProcess, free_port


def run_vllm_host(plan: VllmLoadPlan, on_progress: Callable[[dict[str, Any]], None]) -> BenchResult:
    """One engine with a canary runs each steady batch in each round, after one that warms up.

    `on_progress` receives the figures so far, marked `unfinished`, after each round. Raises EngineEnded, and
    ConfigurationError for a plan that cannot be run.
    """
    check_plan(plan)
    said = {"bench": "vllm-host", "plan": asdict(plan), "environment": environment()}
    answers: dict[str, list[Answer]] = {f"batch-{count}": [] for count in plan.batches}
    with TemporaryDirectory() as folder, ExitStack() as opened:
        endpoint = f"ipc://{folder}/service.sock"
        opened.callback(ServiceProcess.start(endpoint, free_port()).stop)
        engine = opened.enter_context(start_engine(plan, LOG, endpoint, kernels_apart=True))
        said |= engine.answer()
        for number in range(plan.rounds + 1):
            for batch, found in answers.items():
                answer = engine.ask(batch, plan.seed + number)
                if number:
                    found.append({"host_us": without_kernels(answer["host_us"])})
            if number:
                on_progress(said | _figures(answers) | {"unfinished": f"{number} of {plan.rounds} rounds"})
        canary = said["canary"] = engine.ask("report", 0)
    figures = _figures(answers)
    # On a CPU every step patrols and reads counters: goals of a GPU's host say nothing of it.
    on_cpu = any(KERNELS in found for found in figures["batches"].values())
    return BenchResult(
        bench="vllm-host",
        title="Host time of the hooks per steady decode step, us",
        plan=asdict(plan),
        figures=said | figures,
        faults={
            "violations": canary["violations"],
            "observer_faults": canary["observer_faults"],
            "not_ok": canary["state"] if canary["state"] != ["ok"] else [],
        },
        measures={
            name: measure
            for batch, found in figures["batches"].items()
            for name, measure in host_measures(batch, found, {} if on_cpu else HOST_GOALS_US).items()
        },
    )


def _figures(answers: dict[str, list[Answer]]) -> dict[str, Any]:
    return {"batches": {batch: host_figures(found) for batch, found in answers.items()}}
