"""Limits what healing may do in a minute: beyond them it only says what it would have done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

SECONDS = 60.0


class Limits(NamedTuple):
    """The most within a minute."""

    actions: int
    pool_share: float  # 0 to 1, of the pool's blocks; also the most in quarantine


class GuardRail:
    """Counts actions and blocks of the last minute. Beyond a limit it stays closed until `reopen`."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._actions, self._share = limits
        self._clock = clock
        self._done: deque[tuple[float, int, int]] = deque()  # time, actions, blocks
        self._spent = self._lost = 0  # sums of these
        self.closed: str | None = None  # why; None = open

    def admits(self, actions: int, blocks: int, pool: int) -> bool:
        """Count a plan of so many actions and blocks, if it stays within the limits; else close."""
        if self.closed is not None:
            return False
        now = self._clock()
        while self._done and now - self._done[0][0] >= SECONDS:
            _, old_actions, old_blocks = self._done.popleft()
            self._spent, self._lost = self._spent - old_actions, self._lost - old_blocks
        spent, lost = self._spent + actions, self._lost + blocks
        if spent > self._actions:
            self.closed = f"more than {self._actions} actions within a minute (heal_actions_per_minute)"
        elif lost > self._share * pool:
            self.closed = (
                f"{lost} of {pool} blocks within a minute, the limit is {self._share:.0%} (heal_pool_share)"
            )
        else:
            self._done.append((now, actions, blocks))
            self._spent, self._lost = spent, lost
        return self.closed is None

    def reopen(self, limits: Limits | None = None) -> None:
        """An operator has chosen a policy, with other limits or the same."""
        if limits is not None:
            self._actions, self._share = limits
        self.closed = None
        self._done.clear()
        self._spent = self._lost = 0
