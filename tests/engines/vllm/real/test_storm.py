"""The storm can fail: a zeroed idle block is a problem of its leg, and so is a leg without what it claims."""

from __future__ import annotations

import pytest

from tests.engines.vllm.storm.__main__ import run_leg
from tests.engines.vllm.storm.leg import problems
from tests.engines.vllm.storm.legs import LEGS

pytestmark = pytest.mark.timeout(600)


def test_a_fault_is_a_problem_and_a_clean_leg_has_none() -> None:
    found = run_leg("connector", 24.0, 1, fault=True)
    assert any(problem.startswith("violations: ") for problem in found["problems"]), found
    assert any(problem.startswith("states: ") for problem in found["problems"]), found
    clean = found | {
        "violations": [], "service_log": [], "rows_dropped": 0,
        "groups": {name: group | {"violations": 0} for name, group in found["groups"].items()},
        "watch": found["watch"] | {"bad": [], "warnings": []},
    }  # fmt: skip
    assert problems(LEGS["connector"], clean) == []
    assert problems(LEGS["connector"], clean | {"events": clean["events"] | {"connector_loads": 0}}) == [
        "no connector_loads"
    ]
    assert problems(LEGS["llama"], clean | {"watch": clean["watch"] | {"scrapes": 0}}) == [
        "the service was never scraped"
    ]
