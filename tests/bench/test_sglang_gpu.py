"""The engine that `bench sglang-gpu --one-engine` measures with its canary and without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.bench.sglang_gpu import SharedEngine, _no_hits, _not_ok
from canary_obs.errors import UnsupportedEngine


class Engine:
    """Writes down what it is asked."""

    def __init__(self, **answers: Any) -> None:
        self.asked: list[tuple[str, int]] = []
        self._answers = answers

    def ask(self, what: str, seed: int) -> Any:
        self.asked.append((what, seed))
        return self._answers.get(what, {"protected": True, "number": len(self.asked)})


def test_each_canary_that_is_detached_reports_before() -> None:
    engine: Any = Engine()
    shared = SharedEngine(engine)
    for seed, attached in enumerate((True, False, False, True, True, False)):
        shared.have(attached=attached, seed=seed)
    assert engine.asked == [("report", 0), ("detach", 1), ("attach", 3), ("report", 0), ("detach", 5)]
    assert [report["number"] for report in shared.reports] == [1, 4]


def test_a_state_may_name_the_layers_of_drafts_and_nothing_else() -> None:
    left_out = [
        "degraded",
        "80.0% of KV bytes protected, target 99.0%",
        "layers of draft models are not checked",
    ]
    states = [["ok"], left_out, [*left_out, "another reason"], ["blind", *left_out[1:]]]
    plans: list[Any] = [SimpleNamespace(drafts=drafts) for drafts in (True, False)]
    assert [_not_ok(states, plan) for plan in plans] == [states[2:], states[1:]]


def test_hits_that_nobody_compared_are_a_fault_of_the_bench() -> None:
    reports: list[Any] = [{"hashed": {"hit": hits}} for hits in (0, 0, 3)]
    plans: list[Any] = [SimpleNamespace(verify_on_hit=compared) for compared in (True, False)]
    assert [_no_hits(plan, reports) for plan in plans] == [False, False]
    assert [_no_hits(plan, reports[:2]) for plan in plans] == [True, False]


def test_one_without_a_canary_ends_the_bench() -> None:
    """What follows would be measured as if there were one."""
    unprotected = {"protected": False, "refusal": "made up"}
    engine: Any = Engine(report=unprotected)
    with pytest.raises(UnsupportedEngine, match="made up"):
        SharedEngine(engine).have(attached=False, seed=1)
    engine = Engine(attach=unprotected)
    shared = SharedEngine(engine)
    shared.have(attached=False, seed=1)
    with pytest.raises(UnsupportedEngine, match="made up"):
        shared.have(attached=True, seed=1)
