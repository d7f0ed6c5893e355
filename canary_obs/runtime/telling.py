"""Snapshots for the service and lines for the engine's log, in three turns: verdict, counters, all else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from canary_obs.records import GroupCounters
from canary_obs.runtime.reporter import group_counters
from canary_obs.runtime.state_log import StateLog
from canary_obs.runtime.status import Standing, snapshot_of, standing_of

if TYPE_CHECKING:
    from canary_obs.runtime.canary import CanaryRuntime


class Telling:
    """A step of the engine has time for a third of it."""

    def __init__(self, canary: CanaryRuntime) -> None:
        self._canary = canary
        self._state_log = StateLog(canary.reporter.identity)
        self._standing: Standing | None = None
        self._groups: dict[str, GroupCounters] | None = None

    def advance(self) -> bool:
        """The next third, if a snapshot is due or begun; whether there was one."""
        canary, standing, groups = self._canary, self._standing, self._groups
        # What fails is begun anew, not tried again.
        self._standing = self._groups = None
        if standing is None:
            if not canary.reporter.due(time.monotonic()):
                return False
            standing = standing_of(canary)
            self._state_log.tell(standing.state, standing.reasons)
            self._standing = standing
        elif groups is None:
            groups = group_counters(canary.state, standing.counted, standing.beside)
            self._standing, self._groups = standing, groups
        else:
            canary.reporter.tell(snapshot_of(canary, standing, groups))
        return True

    def finish(self) -> None:
        """What was begun, and all of one more if it is due."""
        self._conclude()
        if self.advance():
            self._conclude()

    def _conclude(self) -> None:
        while self._standing is not None:
            self.advance()
