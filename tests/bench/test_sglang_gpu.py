"""The engine that `bench sglang-gpu --one-engine` measures with its canary and without."""

from __future__ import annotations

from typing import Any

import pytest

from canary_obs.bench.sglang_gpu import SharedEngine
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
