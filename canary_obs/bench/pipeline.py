"""`canary-obs bench pipeline`: host time of `after_step` with the pipeline saturated."""

from __future__ import annotations

import time
from tempfile import TemporaryDirectory

from canary_obs.bench.statistics import percentiles
from canary_obs.bench.step import Stage, StepPlan, facts_of, finish
from canary_obs.engines.toolkit.service_process import ServiceProcess, free_port

_FEW_ROWS = 8  # of the pipeline that is to be full


def run_pipeline(plan: StepPlan) -> int:
    """Host time of `after_step`, first with the GPU steadily `block_steps` behind; skipped copies counted.

    A service is attached, as in production: snapshots are written and sent.
    A copy is started in every sixth step, so few rows are enough for the ring to be full at any time then.
    """
    with TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/service.sock"
        service = ServiceProcess.start(endpoint, free_port())  # another one may be running
        try:
            return _pipeline(plan, Stage(plan, pipeline_rows=_FEW_ROWS, endpoint=endpoint))
        finally:
            service.stop()


def _pipeline(plan: StepPlan, stage: Stage) -> int:
    canary, result = stage.canary, facts_of(plan, stage) | {"pipeline_rows": _FEW_ROWS}
    stage.block(plan.block_steps, observed=True, wait=False)
    for kind, wait in (("gpu_steps_behind", False), ("engine_waits_each_step", True)):
        skipped, pushed = (
            canary.counter_reader.status(canary.step, 0.0).skipped,
            canary.counter_reader.next_sequence,
        )
        stage.after_step_us.clear()
        stage.hooks_us.clear()
        stage.turns.clear()
        stage.lag_steps.clear()
        steps = (plan.rounds + 1) * plan.block_steps
        stage.block(steps, observed=True, wait=wait, ahead=plan.block_steps)
        # The first ones let the GPU fall behind.
        result[kind] = {
            "after_step_us": percentiles(stage.after_step_us[plan.block_steps :]),
            "by_turn_us": _by_turn(stage, plan.block_steps),
            "all_hooks_us": percentiles(stage.hooks_us[plan.block_steps :]),
            "least_lag_steps": min(stage.lag_steps[plan.block_steps :]),
            "largest_lag_steps": max(stage.lag_steps),
            "skipped": canary.counter_reader.status(canary.step, 0.0).skipped - skipped,
            "copied": canary.counter_reader.next_sequence - pushed,
        }
    result["service_heard_seconds_ago"] = canary.reporter.peer_age(time.monotonic())
    return finish(plan, stage, result)


def _by_turn(stage: Stage, first: int) -> dict[str, dict[str, float]]:
    """Of the calls from this one on: what they took, by what they had time for."""
    found: dict[str, list[float]] = {}
    for turn, taken in zip(stage.turns[first:], stage.after_step_us[first:], strict=True):
        found.setdefault(turn, []).append(taken)
    return {turn: percentiles(taken) for turn, taken in sorted(found.items())}
