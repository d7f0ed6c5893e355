"""On which stream a step's checks run; on a GPU: tests/gpu/test_side_stream.py."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from canary_obs.engines.toolkit.check_stream import STEPS_PER_QUERY, CheckStream


class Streams:
    """A device, and what is done on its side stream."""

    def __init__(self) -> None:
        self.busy, self.queries = False, 0
        self.calls: list[str] = []
        device: Any = self
        self.chosen = CheckStream(device, device)

    def __getattribute__(self, name: str) -> Any:
        if name == "busy":
            self.queries += 1
        return super().__getattribute__(name)

    def join(self) -> None:
        self.calls.append("join")

    @property
    def after_all(self) -> AbstractContextManager[None]:
        self.calls.append("aside")
        return nullcontext()

    def step(self, *, few_tokens: bool = True) -> list[str]:
        """What one step does on the side stream."""
        self.calls.clear()
        self.chosen.begin_step(few_tokens=few_tokens)
        if self.chosen.join_due:
            self.chosen.join()
        with self.chosen.entered():
            return list(self.calls)

    def steps_to_a_query(self, *, busy: bool) -> None:
        """Up to the step whose beginning queries the device."""
        self.busy = busy
        for _ in range(STEPS_PER_QUERY):
            self.step()


def test_checks_run_aside_until_the_device_is_seen_to_wait() -> None:
    streams = Streams()
    assert streams.step() == ["aside"]
    for _ in range(STEPS_PER_QUERY - 2):
        assert streams.step() == ["join", "aside"]
    assert streams.step() == ["join"], "in line, after what was still aside"
    assert streams.step() == []
    assert streams.queries == 1, "a query costs time as well"


def test_they_run_aside_again_once_it_is_busy() -> None:
    streams = Streams()
    streams.steps_to_a_query(busy=False)
    assert streams.step() == []
    streams.steps_to_a_query(busy=True)
    assert streams.step() == ["join", "aside"]


@pytest.mark.parametrize("before", ["in line", "aside"])
def test_a_long_forward_is_checked_aside(before: str) -> None:
    streams = Streams()
    streams.steps_to_a_query(busy=before == "aside")
    assert streams.step(few_tokens=False) == (["join", "aside"] if before == "aside" else ["aside"])
    assert streams.step() == ["join", "aside"]


@pytest.mark.parametrize("busy", [False, True], ids=["waits", "busy"])
def test_the_second_step_after_a_long_forward_asks_anew(busy: bool) -> None:
    streams = Streams()
    streams.steps_to_a_query(busy=False)
    streams.busy = busy
    for _ in range(2):
        streams.step(few_tokens=False)
    asked = streams.queries
    assert streams.step() == ["join", "aside"], "the long one is still under way"
    assert streams.queries == asked
    assert streams.step() == (["join", "aside"] if busy else ["join"])
    assert streams.queries == asked + 1


def test_a_second_entry_of_a_step_is_joined_by_the_next() -> None:
    streams = Streams()
    streams.step()
    with streams.chosen.entered():
        pass
    streams.steps_to_a_query(busy=False)
    assert streams.step() == []
