"""Detection power and false accusations over simulated years of 10 000 GPUs."""

from __future__ import annotations

import pytest

from tests.fleet.simulation import Plan, Simulation, report


@pytest.mark.slow
def test_failing_gpus_are_named_and_others_are_not_accused() -> None:
    """Two of the years that no threshold was chosen on; docs/fleet.md has the figures of eleven."""
    plans = [Plan(seed=seed) for seed in (401, 402)]
    outcomes = [Simulation(plan).run() for plan in plans]
    for plan, outcome in zip(plans, outcomes, strict=True):
        print(report(plan, outcome))
    failing = sum(outcome.failing for outcome in outcomes)
    assert failing > 30
    assert sum(outcome.named_in_a_day for outcome in outcomes) >= 0.95 * failing
    years = sum(outcome.gpu_years for outcome in outcomes)
    assert sum(outcome.accused for outcome in outcomes) / years < 1 / 10_000


def test_a_small_fleet_without_failing_parts_accuses_nobody() -> None:
    """Six weeks of 400 GPUs under one buggy release after the other."""
    plan = Plan(gpus=400, hours=6 * 168, releases=2, buggy_share=1.0, release_hours=3 * 168, seed=5)
    simulation = Simulation(plan)
    simulation._failing.clear()
    outcome = simulation.run()
    assert outcome.findings > 100
    assert outcome.accused == 0
