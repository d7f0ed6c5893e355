"""`canary-obs bench patrol`: step time against patrol bandwidth on a GPU."""

from __future__ import annotations

from canary_obs.bench.repeated_step import RepeatedStep, StepPlan
from canary_obs.bench.result import BenchResult
from canary_obs.bench.statistics import overhead_by_variant
from canary_obs.config import PatrolBudget, parse_patrol_budget

_BUDGETS = "1%", "1GB/s", "5GB/s", "15GB/s", "50GB/s"


def run_patrol(plan: StepPlan) -> BenchResult:
    """Measure each budget, blocks with the patrol and without it interleaved."""
    step = RepeatedStep(plan)
    figures = step.facts()
    default = step.canary.patrol.bytes_per_second
    by_budget = {}
    for budget in _BUDGETS:
        step.canary.patrol.set_budget(parse_patrol_budget(budget))
        by_budget[budget] = _measure(plan, step)
    figures["by_budget"] = by_budget
    step.canary.patrol.set_budget(PatrolBudget(bytes_per_second=default))
    return step.finish("Step time by patrol budget", figures)


def _measure(plan: StepPlan, step: RepeatedStep) -> dict[str, float]:
    times: dict[str, list[float]] = {"checks": [], "checks_and_patrol": []}
    patrol = step.canary.patrol
    read = seconds = 0.0
    for _ in range(plan.rounds):
        for variant, measured in times.items():
            patrol.enabled = variant == "checks_and_patrol"
            before = step.patrolled_bytes()
            measured.append(step.block(plan.block_steps, observed=True, wait=False))
            if patrol.enabled:
                read += step.patrolled_bytes() - before
                seconds += measured[-1] * plan.block_steps / 1e3
    return overhead_by_variant(times) | {"patrol_gb_s": round(read / seconds / 1e9, 2)}
