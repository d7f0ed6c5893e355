"""A finding is new once, until it was not seen for long enough."""

from __future__ import annotations

import pytest

from canary_obs.runtime.device import findings
from canary_obs.runtime.device.findings import Findings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_stays_is_found_once() -> None:
    clock = Clock()
    found = Findings(60.0, clock)
    assert found.is_new("a")
    for _ in range(100):  # seen again and again, over longer than a minute
        clock.now += 59.0
        assert not found.is_new("a")
    assert found.is_new("b")


def test_what_comes_back_after_a_while_is_new() -> None:
    clock = Clock()
    found = Findings(60.0, clock)
    assert found.is_new("a")
    clock.now += 60.0
    assert found.is_new("a")
    assert not found.is_new("a")


def test_without_memory_everything_is_new() -> None:
    found = Findings(0.0, Clock())
    assert found.is_new("a")
    assert found.is_new("a")


def test_memory_is_bounded_and_forgets_what_was_not_seen_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_REMEMBERED", 3)
    found = Findings(60.0, Clock())
    assert all(found.is_new(name) for name in "abc")
    assert not found.is_new("a")
    assert found.is_new("d")  # forgets b
    assert not found.is_new("a")
    assert found.is_new("b")
