"""Keeps a flood of log lines out of an engine's log, and says how many were left out."""

from __future__ import annotations

import time
from collections.abc import Callable


class LineLimit:
    """So many lines in so many seconds."""

    def __init__(self, lines: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._seconds, self._clock = lines, seconds, clock
        self._began, self._lines = float("-inf"), 0
        self._left_out = 0  # since the last line

    def next_line(self) -> str | None:
        """None = leave this line out; else what to add to it: how many were left out before, if any."""
        now = self._clock()
        if now - self._began >= self._seconds:
            self._began, self._lines = now, 0
        if self._lines == self._most:
            self._left_out += 1
            return None
        self._lines += 1
        more = f" ({self._left_out} more since the last line were left out)" if self._left_out else ""
        self._left_out = 0
        return more
