"""The benches of a captured decode step, with small numbers: the canary they measure checks and finds."""

from __future__ import annotations

import pytest

from canary_obs.bench.patrol import run_patrol
from canary_obs.bench.pipeline import run_pipeline
from canary_obs.bench.repeated_step import StepPlan
from canary_obs.bench.step import run_step


@pytest.mark.parametrize("run", [run_step, run_patrol, run_pipeline])
def test_figures_count(run) -> None:
    result = run(StepPlan(shape="small", requests=4, context=256, rounds=2, block_steps=5))
    assert result.failed == {}
    assert result.figures["observer_faults"] == {}
    assert result.figures["injected_flip_counted_once"]
