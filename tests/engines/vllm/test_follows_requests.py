"""What an adapter still knows of its blocks when outputs fail or never come; real/test_traps.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.vllm.block_owners import BlockOwners
from canary_obs.engines.vllm.follows_requests import FollowsRequests


class Follower(FollowsRequests):
    """Two groups of eight blocks with two slots each; the first one's blocks are 1 and 2."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failing: set[str] = set()
        self._forwards: Any = SimpleNamespace(number=0)
        owners = BlockOwners(8, range(2), empty=True)
        owners.give({0: {1, 2}}, ())
        self._block_changes: Any = SimpleNamespace(owners=owners, assign=lambda *_: self._did("assign"))
        self._by_name: Any = {name: SimpleNamespace(number=number, block_slots=2) for number, name in NAMES}

    def _follow(self, output: Any, observer: Any) -> None:
        self._did("follow")

    def fault(self, *_: Any) -> None:
        """Of the observer."""
        self.done.append("fault")

    def _did(self, what: str) -> None:
        self.done.append(what)
        if what in self.failing:
            raise RuntimeError("planted")

    def step(self, number: int) -> list[int] | None:
        """The scheduler's output of this number has come; slots that the second group has not."""
        self._forwards.number = number
        self.follow_output(SimpleNamespace(), self)  # type: ignore[arg-type]
        found = self.foreign_slots("swa")
        return None if found is None else found.tolist()


Follower.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
NAMES = (0, "full"), (1, "swa")
ALL = list(range(16))


@pytest.fixture
def follower() -> Follower:
    return Follower()


def test_where_every_output_came_all_blocks_have_their_groups(follower: Follower) -> None:
    assert [follower.step(number) for number in (5, 6, 6, 7)] == [ALL] * 4  # 6: one without tokens
    assert follower.foreign_slots("scales") is None


def test_after_an_output_that_never_came_any_block_may_be_anybodys(follower: Follower) -> None:
    assert follower.step(5) == ALL
    assert follower.step(7) == []
    assert follower.step(8) == []


def test_nothing_is_said_while_an_output_is_on_its_way(follower: Follower) -> None:
    follower.step(5)
    follower._forwards.number = 6
    assert follower.foreign_slots("swa") is None


def test_who_gets_blocks_is_noted_before_records_become_unknown(follower: Follower) -> None:
    follower.failing = {"follow"}
    assert follower.step(1) == ALL
    assert follower.done == ["follow", "assign", "fault"]


def test_after_an_output_that_could_not_be_noted_any_block_may_be_anybodys(
    follower: Follower,
) -> None:
    follower.failing = {"follow", "assign"}
    assert follower.step(1) == []
    assert follower.done == ["follow", "assign", "fault"]


def test_an_output_that_came_past_the_worker_was_followed(follower: Follower) -> None:
    """Its number is known once it is followed."""
    follower.step(5)
    follower._follow = lambda *_: setattr(follower._forwards, "number", 6)  # type: ignore[method-assign]
    follower.follow_output(SimpleNamespace(), follower)  # type: ignore[arg-type]
    del follower._follow  # type: ignore[method-assign]
    assert follower.step(7) == ALL
