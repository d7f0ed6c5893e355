"""Builds and sends snapshots one part per call, as a whole one is too much for an engine step."""

from __future__ import annotations

import time
from collections.abc import Iterator

from canary_obs.runtime.report.counters import counter_rows, named_counters
from canary_obs.runtime.report.snapshot import (
    SnapshotParts,
    SnapshotSources,
    make_health_inputs,
    make_snapshot,
)
from canary_obs.runtime.report.state_log import StateLog


class SnapshotBuilder:
    """Sends a snapshot every `snapshot_seconds`, and logs changes of the state."""

    def __init__(self, sources: SnapshotSources) -> None:
        self._sources = sources
        self._state_log = StateLog(sources.reporter.identity)
        self._unfinished: Iterator[None] | None = None

    def advance(self) -> bool:
        """Do one part of a snapshot that is due or unfinished; returns whether there was one."""
        parts, self._unfinished = self._unfinished, None  # a part that raises abandons its snapshot
        if parts is None:
            if not self._sources.reporter.snapshot_due(time.monotonic()):
                return False
            parts = self._parts()
        for _ in parts:
            self._unfinished = parts
            break
        return True

    def finish(self) -> None:
        """Complete an unfinished snapshot, then make one more if it is due."""
        self._complete()
        if self.advance():
            self._complete()

    def _complete(self) -> None:
        while self._unfinished is not None:
            self.advance()

    def _parts(self) -> Iterator[None]:
        # Verdict and counters are of the same host copy; the rest is read when the snapshot is put together.
        sources, counter_reader = self._sources, self._sources.counter_reader
        pipeline = counter_reader.status(sources.run.step, time.monotonic())
        patrol = sources.patrol.progress
        yield
        inputs = make_health_inputs(sources, patrol, pipeline)
        counters, side_counters = counter_reader.counters, counter_reader.side_counters
        findings, redetections = counter_reader.log.counts()
        yield
        state, reasons = sources.health.verdict(inputs)
        self._state_log.update(state, reasons)
        yield
        rows, groups = counter_rows(counters.tolist(), side_counters.tolist()), {}
        for group, *row in zip(sources.state.groups, rows, findings, redetections, strict=True):
            yield
            groups[group.name] = named_counters(*row)
        yield
        snapshot = make_snapshot(sources, SnapshotParts(inputs, state, reasons, groups, patrol, pipeline))
        yield
        sources.reporter.send(snapshot)
        sources.taint.report()
