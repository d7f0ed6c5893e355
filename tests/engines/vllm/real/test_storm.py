"""A real leg reports what was done to it, by the storm's own rules."""

from __future__ import annotations

import pytest

from tests.engines.vllm.storm.__main__ import run_leg
from tests.engines.vllm.storm.legs import LEGS
from tests.engines.vllm.storm.problems import problems

pytestmark = pytest.mark.timeout(600)


def test_a_fault_is_detected_and_makes_the_leg_unclean() -> None:
    found = run_leg("connector", 18.0, 1, fault="table")
    assert found["problems"] == [], "not detected"
    unclean = problems(LEGS["connector"], found)
    assert any(problem.startswith("violations: ") for problem in unclean), unclean
    assert any(problem.startswith("bad: ") for problem in unclean), unclean
    clean = found | {
        "violations": [], "service_log": [], "rows_dropped": 0,
        "groups": {name: group | {"violations": 0} for name, group in found["groups"].items()},
        "watch": found["watch"] | {"bad": [], "warnings": []},
    }  # fmt: skip
    # How often something happens, and is looked at, in so few seconds depends on the machine.
    depends = "no ", "only "
    assert [text for text in problems(LEGS["connector"], clean) if not text.startswith(depends)] == []
