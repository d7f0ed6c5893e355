"""When the next automatic sweep is due, and what is known of those that did not complete."""

from __future__ import annotations

import time
from collections.abc import Callable

from canary_obs.config import CanaryConfig
from canary_obs.vocabulary import SweepStatus

_LONGEST_WAIT = 60.0  # seconds after a failure
_COMPLETE = (SweepStatus.PASSED, SweepStatus.VIOLATED)


class SweepSchedule:
    """After a failure the next automatic sweep waits: `idle_sweep_seconds`, then twice as long each time.

    `ready_at` is the time when protection began. All times are of the clock, in seconds.
    """

    def __init__(self, config: CanaryConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._failures = 0  # since the last complete sweep
        self._not_before = float("-inf")
        self.last_completed: float | None = None
        self.error: str | None = None  # of the last sweep that failed since one completed

    def idle_due(self, ready_at: float) -> bool:
        """Whether an engine that is idle should sweep."""
        return self._config.idle_sweep and self._is_due(ready_at, self._config.idle_sweep_seconds)

    def age_due(self, ready_at: float) -> bool:
        """Whether the last sweep is half as old as it may become, so that a busy engine should sweep, too."""
        return self._config.busy_sweep and self._is_due(ready_at, self._config.sweep_max_age_seconds / 2)

    def ended(self, status: SweepStatus, error: str | None) -> None:
        """A sweep ended, or could not start: FAILED."""
        now, wait = self._clock(), self._config.idle_sweep_seconds
        if status in _COMPLETE:
            self.last_completed, self.error, self._failures = now, None, 0
        elif status is SweepStatus.FAILED:
            self.error = error or "unknown"
            self._not_before = now + min(wait * 2**self._failures, max(wait, _LONGEST_WAIT))
            self._failures = min(self._failures + 1, 32)
        else:  # an operator's wish is not undone at once
            self._not_before = now + wait

    def _is_due(self, ready_at: float, seconds: float) -> bool:
        now = self._clock()
        since = ready_at if self.last_completed is None else self.last_completed
        return now - since > seconds and now >= self._not_before
