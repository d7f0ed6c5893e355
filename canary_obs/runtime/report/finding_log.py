"""Names violations in the engine's own log, so that they are read without a service."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from canary_obs.errors import describe
from canary_obs.records import Identity, Violation

log = logging.getLogger("canary_obs")
_LINES, _SECONDS = 10, 10.0  # most lines in so many seconds


class FindingLog:
    """One WARNING for each finding; those beyond the rate are counted."""

    def __init__(self, identity: Identity, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank = f"rank {identity.rank} of {identity.engine}/{identity.instance}"
        self._clock = clock
        self._began, self._lines = float("-inf"), 0
        self._left_out = 0  # new findings without a line, since the last one

    def update(self, found: Sequence[Violation], incident: str) -> None:
        """Log these findings of an incident."""
        for violation in found:
            self._report(violation, incident)

    def _report(self, violation: Violation, incident: str) -> None:
        now = self._clock()
        if now - self._began >= _SECONDS:
            self._began, self._lines = now, 0
        if self._lines == _LINES:
            self._left_out += 1
            return
        self._lines += 1
        more = f" ({self._left_out} more since the last line were left out)" if self._left_out else ""
        self._left_out = 0
        log.warning(
            "canary_obs: %s: KV cache violation: %s, incident=%s%s",
            self._rank, describe(violation), incident, more,
        )  # fmt: skip
