"""`canary-obs bench sweep-start` on a small cache."""

from __future__ import annotations

from canary_obs.bench.sweep_start import SweepStartPlan, run_sweep_start


def test_every_slot_is_walked_in_parts() -> None:
    result = run_sweep_start(SweepStartPlan(slots=1 << 14, block_size=16, rounds=2, seed=1))
    assert result.failed == {}
    assert result.figures["parts"] == 4
    assert 0 < result.figures["part_ms"] <= result.figures["longest_part_ms"]
    assert set(result.measures) == {"start, milliseconds", "longest part, milliseconds"}
