"""Rate limit of write requests per token: a minute's worth at once, then evenly spaced (GCRA)."""

from __future__ import annotations

import time
from collections.abc import Callable

MINUTE_NS = 60_000_000_000


class RateLimiter:
    """A generic cell rate algorithm per token name. Not thread-safe: one event loop uses it."""

    def __init__(self, per_minute: int, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._interval, self._clock_ns = MINUTE_NS // per_minute, clock_ns
        self._tolerance = self._interval * (per_minute - 1)  # ns that a burst may be ahead of even spacing
        # By token name: when the requests so far would have been due, evenly spaced, in ns. Bounded by the
        # number of tokens.
        self._due: dict[str | None, int] = {}

    def acquire(self, name: str | None) -> float:
        """Count a request of this token and return 0.0, or return the seconds until one is allowed."""
        if (seconds := self.seconds_left(name)) > 0:
            return seconds
        now = self._clock_ns()
        self._due[name] = max(self._due.get(name, now), now) + self._interval
        return 0.0

    def seconds_left(self, name: str | None) -> float:
        """Seconds until a request of this token is allowed; 0.0 = now. Counts nothing."""
        now = self._clock_ns()
        return max(0.0, (self._due.get(name, now) - now - self._tolerance) / 1e9)
