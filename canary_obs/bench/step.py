"""`canary-obs bench step`: what the canary adds to a decode step and to a prefill step on a GPU."""

from __future__ import annotations

from typing import Any

from canary_obs.bench.repeated_step import RepeatedStep, StepPlan
from canary_obs.bench.result import BenchResult, Measure
from canary_obs.bench.statistics import overhead_by_variant, overhead_measures

GOAL = 0.005  # of a step
_PREFILL_ROUNDS = 8


def run_step(plan: StepPlan) -> BenchResult:
    """Interleave blocks without the canary, with its checks, and with checks and patrol."""
    step = RepeatedStep(plan)
    figures = step.facts()
    measures: dict[str, Measure] = {}
    figures["engine_runs_ahead"] = _decode(plan, step, measures, wait=False)
    figures["engine_waits_each_step"] = _decode(plan, step, measures, wait=True)
    figures["prefill"] = _prefill(step, measures)
    return step.finish("step", "What the canary adds to a step", figures, measures)


def _decode(
    plan: StepPlan, step: RepeatedStep, measures: dict[str, Measure], *, wait: bool
) -> dict[str, Any]:
    times: dict[str, list[float]] = {"none": [], "checks": [], "checks_and_patrol": []}
    patrol = step.canary.patrol
    read = seconds = 0.0
    spent, first_step = dict(step.canary.overhead), step.canary.step
    for round_number in range(plan.rounds + 1):
        for variant, measured in times.items():
            patrol.enabled = variant == "checks_and_patrol"
            before = step.patrolled_bytes()
            milliseconds = step.block(plan.block_steps, observed=variant != "none", wait=wait)
            if round_number:  # the first round warms up
                measured.append(milliseconds)
                read += step.patrolled_bytes() - before if patrol.enabled else 0
                seconds += milliseconds * plan.block_steps / 1e3 if patrol.enabled else 0.0
    steps = step.canary.step - first_step
    # An engine that waits for each step's tokens pays for every launch: measured, without a goal.
    name, goal = ("decode, engine waits", None) if wait else ("decode, engine runs ahead", GOAL)
    measures |= overhead_measures(times, name, goal)
    return overhead_by_variant(times) | {
        "patrol_gb_s": round(read / seconds / 1e9, 2),
        "host_us": {
            hook: round(1e6 * (total - spent[hook]) / steps, 1)
            for hook, total in step.canary.overhead.items()
        },
    }


def _prefill(step: RepeatedStep, measures: dict[str, Measure]) -> dict[str, float]:
    """Repeat one prefill step, the engine waiting for it: without the canary, and at its defaults."""
    times: dict[str, list[float]] = {"none": [], "checks_and_patrol": []}
    step.canary.patrol.enabled = True
    for round_number in range(_PREFILL_ROUNDS + 1):
        for variant, measured in times.items():
            milliseconds = step.block(1, observed=variant != "none", wait=True, batch=step.prefill)
            if round_number:
                measured.append(milliseconds)
    measures |= overhead_measures(times, "prefill", GOAL)
    return {"tokens": float(sum(step.prefill.extends)), **overhead_by_variant(times)}
