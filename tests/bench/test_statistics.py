"""What is said of step times."""

from __future__ import annotations

import pytest

from canary_obs.bench.statistics import compared, exit_code, percentiles
from canary_obs.bench.vllm_flips import not_found


def test_percentiles_of_known_values() -> None:
    values = [float(n) for n in range(1000, 0, -1)]
    expected = {"p50": 501.0, "p90": 901.0, "p99": 991.0, "p999": 1000.0, "max": 1000.0, "calls": 1000}
    assert percentiles(values) == expected
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0, "p999": 3.0, "max": 3.0, "calls": 1}


def test_kinds_are_compared_round_by_round() -> None:
    times = {"none": [1.0, 2.0, 4.0], "checks": [1.1, 2.2, 8.0], "checks_and_patrol": [1.1, 2.2, 4.0]}
    found = compared(times)
    assert (found["none_ms"], found["checks_ms"], found["checks_and_patrol_ms"]) == (2.0, 2.2, 2.2)
    assert found["checks_over_none"] == pytest.approx(0.1)
    assert found["checks_and_patrol_over_none"] == pytest.approx(0.1)
    assert found["patrol_over_checks"] == 0.0


def test_rounds_of_different_number_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        compared({"none": [1.0, 2.0], "checks": [1.0]})


def test_figures_of_a_canary_that_failed_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(violations=0, observer_faults={}, waits=None) == 0
    assert capsys.readouterr().err == ""
    assert exit_code(violations=0, observer_faults={"head": 8}) == 1
    told = "these figures are not those of a sound canary: observer_faults = {'head': 8}; see its log\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("wrong", ["caught", "slot_named", "other_violations"])
def test_flips_that_were_not_found_where_they_were(wrong: str) -> None:
    sound = {"flips": 4, "caught": 4, "slot_named": 4, "other_violations": 0}
    unsound = sound | {wrong: 3}
    assert not_found({"idle": sound, "in_use": unsound}) == {"in_use": unsound}
    assert not_found({"idle": sound}) == {}
    del sound["slot_named"]  # where an element's place does not tell it
    assert not_found({"idle": sound}) == {}
