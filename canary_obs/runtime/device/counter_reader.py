"""Brings counters and violation rows from the device to the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from canary_kernels import layout
from canary_obs.records import PipelineStatus, Violation
from canary_obs.runtime.device.delayed_device_host import DelayedDeviceHost, Sample
from canary_obs.runtime.device.state import DeviceState
from canary_obs.runtime.device.violation_log import ViolationLog
from canary_obs.runtime.health import Health

_ROWS_SECONDS = 2.0
_RUNS = slice(layout.COUNT_RUNS, layout.COUNT_RUNS + layout.NUM_PHASES)


class CounterReader:
    """Two delayed pipelines: the counters, and counters with the log when a violation counter moved."""

    def __init__(
        self,
        state: DeviceState,
        health: Health,
        log: ViolationLog,
        pipeline_rows: int,
        on_copy: Callable[[Sample, int], None],
    ) -> None:
        """`on_copy(copy, step)` is called for each copy of the counters that `process` uses."""
        self._health, self._on_copy, self._owed = health, on_copy, state.owed
        self.delayed, self._adoptions = state.clock.is_cuda, state.adoptions  # delayed: a copy takes time
        health.add_source(state.owed, state.owed.acknowledge)
        # Half a kilobyte per group takes 2 us on the engine's stream; a side stream costs three more calls.
        self._counters = DelayedDeviceHost(state.all_counters, pipeline_rows, side_stream=False)
        self._rows = DelayedDeviceHost(state.flat, 2)
        self._words = state.counter_words
        self._zeros = np.zeros(self._words, dtype=np.int64)
        self._lanes = bytes(len(state.groups) * layout.NUM_LANES * 8)  # violations of the newest copy
        self.log = log
        self.sample: Sample | None = None  # the newest host copy
        self._fetched: Sample | None = None  # arrived, not processed yet
        self.violations = 0  # counted up to the newest host copy
        self.alarmed = False  # there are violations whose rows were not read yet
        self._alarmed_at = 0.0  # time.monotonic() of the first of them

    def findings(self, now: float) -> int:
        """Violations without redetections. Those whose rows do not come within 2 s count as findings."""
        unread = self.violations - self.log.events_read
        overdue = self.alarmed and now - self._alarmed_at > _ROWS_SECONDS
        return self.log.findings + (unread if overdue else 0)

    @property
    def next_sequence(self) -> int:
        """Sequence of the next counter copy."""
        return self._counters.next_sequence

    @property
    def newest_sequence(self) -> int:
        """Sequence of the newest host copy; -1 before the first."""
        return -1 if self.sample is None else self.sample.sequence

    @property
    def counters(self) -> NDArray[np.int64]:
        """[groups * COUNTER_WORDS] of the newest host copy; zeros before the first has arrived."""
        return self._zeros if self.sample is None else self.sample.words[: self._words]

    @property
    def side_counters(self) -> NDArray[np.int64]:
        """[groups * COUNTER_WORDS] of the patrol's own stream, from the same copy."""
        return self._zeros if self.sample is None else self.sample.words[self._words :]

    def side_counters_of(self, group: int) -> bytes:
        """int64 [COUNTER_WORDS] of one group's side counters; only after a first copy has arrived."""
        assert self.sample is not None
        start = self._words + group * layout.COUNTER_WORDS
        return self.sample.words[start : start + layout.COUNTER_WORDS].tobytes()

    @property
    def busy(self) -> bool:
        """Whether a copy is in flight, or arrived and was not processed, or rows wait to be read."""
        return self._counters.busy or self._fetched is not None or self.alarmed

    def settled(self, step: int) -> bool:
        """Whether everything found up to this step has been read."""
        return not self.busy and self.sample is not None and self.sample.step == step

    def status(self, step: int, now: float) -> PipelineStatus:
        """Lag and skips for the snapshot; `now` from time.monotonic()."""
        steps, seconds = self._counters.lag(step, now)
        return PipelineStatus(lag_steps=steps, lag_seconds=seconds, skipped=self._counters.skipped)

    def poll(self, step: int) -> list[Violation]:
        """Push, fetch, process and read rows; returns violations that became readable. Never waits."""
        self.push(step)
        self.fetch()
        self.process(step)
        return self.read_rows(step) if self.alarmed else []

    def push(self, step: int) -> None:
        """Start one copy of the counters, unless `pipeline_rows` copies are in flight."""
        sequence = self._counters.next_sequence
        if self._counters.push(step, time.monotonic()):
            self._health.expect_runs(sequence)
            self._owed.expect(sequence)
            # It must not count what the next forward has compared by then.
            self._adoptions.others += self.delayed

    def fetch(self) -> None:
        """Keep the newest copy that has arrived, for `process`."""
        self._fetched = self._counters.newest() or self._fetched

    def process(self, step: int) -> None:
        """Update violations and health from the fetched copy, if there is one."""
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            self._process(fetched, step)

    def read_rows(self, step: int) -> list[Violation]:
        """When alarmed: start to copy the log, or read a copy that arrived; returns its new violations."""
        if not self._rows.busy and self.log.has_unread(self.violations):
            self._rows.push(step, time.monotonic())
        return self._read(self._rows.poll(), step)

    def drain(self, step: int, timeout: float) -> list[Violation]:
        """Wait up to `timeout` seconds for all violations known on the device: at rest or at shutdown."""
        found = self.poll(step)
        for sample in self._counters.flush(timeout):
            self._process(sample, step)
        found += self._read(self._rows.flush(timeout), step)
        if self.log.has_unread(self.violations):
            self._rows.push(step, time.monotonic())
            found += self._read(self._rows.flush(timeout), step)
        return found

    def _process(self, sample: Sample, step: int) -> None:
        # Counters only grow: the newest copy holds all that those before it did. As bytes and short lists:
        # a step of the engine pays for this, and with many groups all of it would be thousands of numbers.
        self.sample = sample
        table = self.counters.reshape(-1, layout.COUNTER_WORDS)
        lanes = table[:, : layout.NUM_LANES].tobytes()
        if lanes != self._lanes:
            self._lanes, self.violations = lanes, int(table[:, : layout.NUM_LANES].sum())
            if not self.alarmed:
                self.alarmed, self._alarmed_at = True, time.monotonic()
        self._health.compare_runs(sample.sequence, table[:, _RUNS].tolist())
        self._owed.reconcile(sample.sequence, table)
        self._on_copy(sample, step)

    def _read(self, copies: list[Sample], step: int) -> list[Violation]:
        found: list[Violation] = []
        for copy in copies:
            found += self.log.read(copy.values, step)
            self._alarmed_at = time.monotonic()
        self.alarmed = self._rows.busy or self.log.has_unread(self.violations)
        return found
