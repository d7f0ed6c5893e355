"""The benches of a captured decode step, small: what they measure is a canary that checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from canary_obs.bench.pipeline import run_pipeline
from canary_obs.bench.step import StepPlan, run_patrol, run_step


@pytest.mark.parametrize("run", [run_step, run_patrol, run_pipeline])
def test_figures_count(run, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    plan = StepPlan(shape="small", requests=4, context=256, rounds=2, block_steps=5, output=output)
    assert run(plan) == 0
    told = json.loads(output.read_text())
    assert (told["observer_faults"], told["planted_flip_counted_once"]) == ({}, True)
