"""`canary-obs bench patrol`: step time against patrol bandwidth on a GPU."""

from __future__ import annotations

from canary_obs.bench.repeated_step import RepeatedStep, StepPlan
from canary_obs.bench.result import BenchResult, Measure
from canary_obs.bench.statistics import overhead_by_variant, overhead_measures
from canary_obs.config_values import PatrolBudget, parse_patrol_budget

_BUDGETS = "1%", "1GB/s", "5GB/s", "15GB/s", "50GB/s"
GOALS = {"1%": 0.001, "15GB/s": 0.001}  # of a step


def run_patrol(plan: StepPlan) -> BenchResult:
    """Measure each budget, blocks with the patrol and without it interleaved."""
    step = RepeatedStep(plan)
    figures = step.facts()
    default = step.canary.patrol.bytes_per_second
    by_budget = {}
    measures: dict[str, Measure] = {}
    for budget in _BUDGETS:
        step.canary.patrol.set_budget(parse_patrol_budget(budget))
        by_budget[budget] = _measure(plan, step, budget, measures)
    figures["by_budget"] = by_budget
    step.canary.patrol.set_budget(PatrolBudget(bytes_per_second=default))
    return step.finish("patrol", "Step time by patrol budget", figures, measures)


def _measure(
    plan: StepPlan, step: RepeatedStep, budget: str, measures: dict[str, Measure]
) -> dict[str, float]:
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
    measures |= overhead_measures(times, budget, GOALS.get(budget))
    return overhead_by_variant(times) | {"patrol_gb_s": round(read / seconds / 1e9, 2)}
