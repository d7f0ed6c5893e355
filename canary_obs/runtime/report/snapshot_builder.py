"""Snapshots for the service and lines for the engine's log, made a part at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from canary_obs.runtime.report.reporter import counter_rows, named_counters
from canary_obs.runtime.report.snapshot import SnapshotParts, make_health_inputs, snapshot_of
from canary_obs.runtime.report.state_log import StateLog

if TYPE_CHECKING:
    from canary_obs.runtime.canary import CanaryRuntime


class SnapshotBuilder:
    """A step of the engine has time for a part of it."""

    def __init__(self, canary: CanaryRuntime) -> None:
        self._canary = canary
        self._state_log = StateLog(canary.reporter.identity)
        self._under_way: Iterator[None] | None = None

    def advance(self) -> bool:
        """The next part, if a snapshot is due or begun; whether there was one."""
        parts, self._under_way = self._under_way, None  # what fails is begun anew, not tried again
        if parts is None:
            if not self._canary.reporter.due(time.monotonic()):
                return False
            parts = self._parts()
        for _ in parts:
            self._under_way = parts
            break
        return True

    def finish(self) -> None:
        """What was begun, and all of one more if it is due."""
        self._conclude()
        if self.advance():
            self._conclude()

    def _conclude(self) -> None:
        while self._under_way is not None:
            self.advance()

    def _parts(self) -> Iterator[None]:
        """Verdict and counters are of one moment, the rest is as of when it is asked for."""
        canary, counter_reader = self._canary, self._canary.counter_reader
        patrol, pipeline = canary.patrol.progress, counter_reader.status(canary.step, time.monotonic())
        yield
        health_inputs, counted, beside = (
            make_health_inputs(canary, patrol, pipeline),
            counter_reader.counted,
            counter_reader.beside,
        )
        yield
        state, reasons = canary.health.verdict(health_inputs)
        self._state_log.tell(state, reasons)
        yield
        rows, groups = counter_rows(counted.tolist(), beside.tolist()), {}
        for group, row in zip(canary.state.groups, rows, strict=True):
            yield
            groups[group.name] = named_counters(row)
        yield
        snapshot = snapshot_of(canary, SnapshotParts(health_inputs, state, reasons, groups, patrol, pipeline))
        yield
        canary.reporter.tell(snapshot)
