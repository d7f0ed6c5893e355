"""Notices an engine step that lasts, on the link's thread: the engine's own cannot report meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

from canary_obs.records import Identity, StepUnderWay
from canary_obs.runtime.run_state import RunState

_FIRST_SECONDS = 1.0  # a step that lasts longer is reported
_INTERVAL_SECONDS = 0.5  # between reports


class StepWatch:
    """Compares what the engine's thread has done with what it had done at the call before."""

    def __init__(
        self,
        identity: Identity,
        run: RunState,
        in_step: Callable[[], bool],
        snapshots: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """in_step: whether a forward or a step is under way now; snapshots: how many were made so far."""
        self._identity, self._run, self._in_step, self._clock = identity, run, in_step, clock
        self._snapshots = snapshots
        self._progress: tuple[int, float | None, int] | None = None
        self._progressed = self._reported = clock()

    def report(self) -> StepUnderWay | None:
        """The report that is due; None = no step is under way, or a short one."""
        now, run = self._clock(), self._run
        progress = run.step, run.last_step_end, self._snapshots()
        # An engine that is idle makes no progress either, and is expected to send snapshots.
        if progress != self._progress or not run.armed or not self._in_step():
            self._progress, self._progressed = progress, now
            return None
        seconds = now - self._progressed
        if seconds < _FIRST_SECONDS or now - self._reported < _INTERVAL_SECONDS:
            return None
        self._reported = now
        return StepUnderWay(identity=self._identity, seconds=seconds)
