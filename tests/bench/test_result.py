"""What a bench is judged by."""

from __future__ import annotations

import pytest

from canary_obs.bench.result import BenchResult, Measure


@pytest.mark.parametrize(
    ("measure", "met"),
    [
        (Measure(value=0.004, goal=0.005), True),
        (Measure(value=0.005, goal=0.005), True),
        (Measure(value=0.0051, goal=0.005), False),
        (Measure(value=0.96, better="higher", goal=0.97), False),
        (Measure(value=0.97, better="higher", goal=0.97), True),
        (Measure(value=1e9), True),
    ],
)
def test_a_goal_is_the_worst_value_that_is_good_enough(measure: Measure, met: bool) -> None:
    assert measure.met is met


def test_a_result_names_its_commit_what_is_missed_and_what_failed() -> None:
    result = BenchResult(
        bench="step",
        title="a step",
        plan={"requests": 4},
        figures={"seconds": [1.0, 2.0]},
        faults={"violations": 0, "observer_faults": {"head": 1}},
        measures={"decode": Measure(value=0.01, goal=0.005), "prefill": Measure(value=0.001, goal=0.005)},
    )
    assert list(result.missed) == ["decode"]
    written = result.to_json()
    assert written["environment"]["commit"] not in ("", "unknown")
    assert (written["bench"], written["plan"]) == ("step", {"requests": 4})
    assert written["seconds"] == [1.0, 2.0]
    assert written["unsound"] == {"observer_faults": {"head": 1}}
    assert written["measures"]["decode"] == {
        "value": 0.01, "better": "lower", "noise": 0.0, "goal": 0.005, "met": False,
    }  # fmt: skip
