"""Separates what is found for the first time from what was found before and is still there."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

_REMEMBERED = 8192


class Findings:
    """A finding is new unless it was seen within `forget_seconds`: damage that stays is seen that often.

    The oldest are forgotten beyond 8192. With `forget_seconds=0` everything is new.
    """

    def __init__(self, forget_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._forget_seconds, self._clock = forget_seconds, clock
        self._seen_at: OrderedDict[Hashable, float] = OrderedDict()

    def is_new(self, finding: Hashable) -> bool:
        """Note that it was seen now; returns whether that was the first time."""
        now = self._clock()
        seen_at = self._seen_at.pop(finding, None)
        self._seen_at[finding] = now
        if len(self._seen_at) > _REMEMBERED:
            self._seen_at.popitem(last=False)
        return seen_at is None or now - seen_at >= self._forget_seconds
