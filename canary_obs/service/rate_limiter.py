"""How many orders a token may give: so many at once, then one whenever its share of a minute has passed."""

from __future__ import annotations

import time
from collections.abc import Callable

MINUTE_NS = 60_000_000_000


class RateLimiter:
    """One per service; names come from the keyring, so there are few. Used by one event loop only."""

    def __init__(self, per_minute: int, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._interval, self._clock_ns = MINUTE_NS // per_minute, clock_ns
        self._patience = self._interval * (per_minute - 1)
        self._due: dict[str | None, int] = {}  # when what was given so far would have been due, evenly spaced

    def wait(self, name: str | None) -> float:
        """Seconds until `name` may give an order; 0 = now, and this one is counted."""
        now = self._clock_ns()
        due = max(self._due.get(name, now), now)
        if due - now > self._patience:
            return (due - now - self._patience) / 1e9
        self._due[name] = due + self._interval
        return 0.0
