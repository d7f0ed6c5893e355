"""Percentiles and overheads of step times; flips that were not found."""

from __future__ import annotations

import pytest

from canary_obs.bench.statistics import overhead_by_variant, paired_overhead, percentiles
from canary_obs.bench.vllm_flips import incomplete


def test_percentiles_of_known_values() -> None:
    values = [float(n) for n in range(1000, 0, -1)]
    expected = {"p50": 501.0, "p90": 901.0, "p99": 991.0, "p999": 1000.0, "max": 1000.0, "calls": 1000}
    assert percentiles(values) == expected
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0, "p999": 3.0, "max": 3.0, "calls": 1}


def test_variants_are_compared_round_by_round() -> None:
    times = {"none": [1.0, 2.0, 4.0], "checks": [1.1, 2.2, 8.0], "checks_and_patrol": [1.1, 2.2, 4.0]}
    found = overhead_by_variant(times)
    assert (found["none_ms"], found["checks_ms"], found["checks_and_patrol_ms"]) == (2.0, 2.2, 2.2)
    assert found["checks_over_none"] == pytest.approx(0.1)
    assert found["checks_and_patrol_over_none"] == pytest.approx(0.1)
    assert found["patrol_over_checks"] == 0.0


def test_rounds_of_different_number_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        overhead_by_variant({"none": [1.0, 2.0], "checks": [1.0]})


def test_paired_overhead_and_its_interval() -> None:
    pairs = [(1.0 + 0.01 * number, 1.1 + 0.011 * number) for number in range(20)]
    found = paired_overhead(pairs, block_steps=10, seed=1)
    assert (found["pairs"], found["overhead"], found["overhead_median_pair"]) == (20, 0.1, 0.1)
    assert found["overhead_95"] == [0.1, 0.1]
    assert (found["step_ms_none"], found["step_ms_log"]) == (109.5, 120.45)
    noisy = paired_overhead([(1.0, 1.0), (1.0, 1.2)] * 10, block_steps=1, seed=1)
    low, high = noisy["overhead_95"]
    assert 0.0 < low < noisy["overhead"] == 0.1 < high < 0.2


@pytest.mark.parametrize("wrong", ["caught", "slot_named", "other_violations"])
def test_flips_that_were_not_found_where_they_were(wrong: str) -> None:
    sound = {"flips": 4, "caught": 4, "slot_named": 4, "other_violations": 0}
    unsound = sound | {wrong: 3}
    assert incomplete({"idle": sound, "in_use": unsound}) == {"in_use": unsound}
    assert incomplete({"idle": sound}) == {}
    del sound["slot_named"]  # where an element's place does not determine it
    assert incomplete({"idle": sound}) == {}
