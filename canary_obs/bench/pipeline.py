"""`canary-obs bench pipeline`: host time of `after_step` while the GPU lags many steps."""

from __future__ import annotations

import time
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.bench.repeated_step import RepeatedStep, StepPlan
from canary_obs.bench.result import BenchResult, Measure
from canary_obs.bench.statistics import percentiles
from canary_obs.engines.toolkit.service_process import ServiceProcess, free_port

GOAL_US = 50.0  # p99 of after_step
_VARIANTS = {"gpu_steps_behind": False, "engine_waits_each_step": True}
_PIPELINE_ROWS = 8  # a copy starts in every sixth step, so these are full all the time


def run_pipeline(plan: StepPlan) -> BenchResult:
    """Measure with the GPU lagging steadily by `block_steps` steps, then with an engine that waits each step.

    A service is attached, as in production: snapshots are built and sent.
    """
    with TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/service.sock"
        service = ServiceProcess.start(endpoint, free_port())  # the default port may be in use
        try:
            return _measure(plan, RepeatedStep(plan, pipeline_rows=_PIPELINE_ROWS, endpoint=endpoint))
        finally:
            service.stop()


def _measure(plan: StepPlan, step: RepeatedStep) -> BenchResult:
    canary, figures = step.canary, step.facts() | {"pipeline_rows": _PIPELINE_ROWS}
    step.block(plan.block_steps, observed=True, wait=False)
    for name, wait in _VARIANTS.items():
        figures[name] = _block(plan, step, wait=wait)
    figures["service_heard_seconds_ago"] = canary.reporter.peer_age(time.monotonic())
    measures = {}
    for name, quantile in product(_VARIANTS, ("p50", "p99")):
        value = figures[name]["after_step_us"][quantile]
        # Hosts differ by so much.
        measure = Measure(value=value, noise=0.25 * value, goal=GOAL_US if quantile == "p99" else None)
        measures[f"{name}: {quantile} of after_step, microseconds"] = measure
    return step.finish("pipeline", "Host time of after_step, microseconds", figures, measures)


def _block(plan: StepPlan, step: RepeatedStep, *, wait: bool) -> dict[str, Any]:
    reader = step.canary.counter_reader
    skipped, sequence = reader.status(step.canary.step, 0.0).skipped, reader.next_sequence
    step.clear_measurements()
    step.block((plan.rounds + 1) * plan.block_steps, observed=True, wait=wait, ahead=plan.block_steps)
    first = plan.block_steps  # until then the lag grows
    by_task: dict[str, list[float]] = {}
    for task, spent in zip(step.tasks[first:], step.after_step_us[first:], strict=True):
        by_task.setdefault(task, []).append(spent)
    return {
        "after_step_us": percentiles(step.after_step_us[first:]),
        "by_task_us": {task: percentiles(spent) for task, spent in sorted(by_task.items())},
        "all_hooks_us": percentiles(step.hooks_us[first:]),
        "least_lag_steps": min(step.lag_steps[first:]),
        "largest_lag_steps": max(step.lag_steps),
        "skipped": reader.status(step.canary.step, 0.0).skipped - skipped,
        "copied": reader.next_sequence - sequence,
    }
