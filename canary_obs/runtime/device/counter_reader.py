"""Brings counters and violation rows to the host and hands each to those who wait for it."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from canary_kernels import layout
from canary_obs.config import CanaryConfig
from canary_obs.records import PipelineStatus, Violation
from canary_obs.runtime.device.delayed_device_host import DelayedDeviceHost, Sample
from canary_obs.runtime.device.state import DeviceState
from canary_obs.runtime.device.violation_log import ViolationLog
from canary_obs.runtime.health import Health
from canary_obs.runtime.sweep.sweeper import Sweeper

_RUNS = slice(layout.COUNT_RUNS, layout.COUNT_RUNS + layout.NUM_PHASES)


class CounterReader:
    """Two delayed pipelines: the counters, and counters with the log when a violation counter moved."""

    def __init__(self, state: DeviceState, health: Health, sweeper: Sweeper, config: CanaryConfig) -> None:
        self._health, self._sweeper = health, sweeper
        # Half a kilobyte per group takes 2 us on the engine's stream; a side stream costs three more calls.
        self._counters = DelayedDeviceHost(state.all_counters, config.pipeline_rows, side_stream=False)
        self._rows = DelayedDeviceHost(state.flat, 2)
        self._words = state.counter_words
        self._nothing = np.zeros(self._words, dtype=np.int64)
        self._lanes = bytes(len(state.groups) * layout.NUM_LANES * 8)  # violations of the newest copy
        self.log = ViolationLog(state, reveal_tokens=config.reveal_tokens)
        self.sample: Sample | None = None  # the newest host copy
        self._fetched: Sample | None = None  # arrived, not looked at yet
        self.violations = 0  # counted up to the newest host copy
        self.alarmed = False  # there are violations whose rows were not read yet

    @property
    def next_sequence(self) -> int:
        """Sequence of the next counter copy."""
        return self._counters.next_sequence

    @property
    def newest_sequence(self) -> int:
        """Sequence of the newest host copy; -1 before the first."""
        return -1 if self.sample is None else self.sample.sequence

    @property
    def counted(self) -> NDArray[np.int64]:
        """[groups * COUNTER_WORDS] of the newest host copy; zeros before the first has arrived."""
        return self._nothing if self.sample is None else self.sample.words[: self._words]

    @property
    def beside(self) -> NDArray[np.int64]:
        """The same, counted beside the engine's stream."""
        return self._nothing if self.sample is None else self.sample.words[self._words :]

    def counted_beside(self, group: int) -> bytes:
        """The words of one group, int64 [COUNTER_WORDS], of the newest host copy; one has arrived."""
        assert self.sample is not None
        start = self._words + group * layout.COUNTER_WORDS
        return self.sample.words[start : start + layout.COUNTER_WORDS].tobytes()

    @property
    def busy(self) -> bool:
        """Whether anything is under way to the host, or is known to be there and was not fetched yet."""
        return self._counters.busy or self._fetched is not None or self.alarmed

    def settled(self, step: int) -> bool:
        """Whether all that was found up to this step has been read."""
        return not self.busy and self.sample is not None and self.sample.step == step

    def status(self, step: int, now: float) -> PipelineStatus:
        """Lag and skips for the snapshot."""
        steps, seconds = self._counters.lag(step, now)
        return PipelineStatus(lag_steps=steps, lag_seconds=seconds, skipped=self._counters.skipped)

    def turn(self, step: int) -> list[Violation]:
        """Start one copy, take what has arrived; returns violations that became readable. Never waits."""
        self.push(step)
        self.fetch()
        self.look(step)
        return self.rows(step) if self.alarmed else []

    def push(self, step: int) -> None:
        """Start one copy of the counters; none while as many are under way as there may be."""
        sequence = self._counters.next_sequence
        if self._counters.push(step, time.monotonic()):
            self._health.expect(sequence)

    def fetch(self) -> None:
        """Take the newest copy that has arrived, for `look`."""
        self._fetched = self._counters.newest() or self._fetched

    def look(self, step: int) -> None:
        """See what the copy that was fetched tells."""
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            self._look(fetched, step)

    def rows(self, step: int) -> list[Violation]:
        """When alarmed: start to bring the rows, or take what has arrived; returns what became readable."""
        if not self._rows.busy and self.log.moved(self.violations):
            self._rows.push(step, time.monotonic())
        return self._read(self._rows.poll(), step)

    def drain(self, step: int, timeout: float) -> list[Violation]:
        """At rest or at shutdown: wait up to `timeout` seconds for all that is known on the device."""
        found = self.turn(step)
        for sample in self._counters.flush(timeout):
            self._look(sample, step)
        found += self._read(self._rows.flush(timeout), step)
        if self.log.moved(self.violations):
            self._rows.push(step, time.monotonic())
            found += self._read(self._rows.flush(timeout), step)
        return found

    def _look(self, sample: Sample, step: int) -> None:
        # Counters only grow: the newest copy tells all that those before it did. As bytes and short lists:
        # a step of the engine pays for this, and with many groups all of it would be thousands of numbers.
        self.sample = sample
        table = self.counted.reshape(-1, layout.COUNTER_WORDS)
        lanes = table[:, : layout.NUM_LANES].tobytes()
        if lanes != self._lanes:
            self._lanes, self.violations = lanes, int(table[:, : layout.NUM_LANES].sum())
            self.alarmed = True
        self._health.observe(sample.sequence, table[:, _RUNS].tolist())
        if self._sweeper.running:
            self._sweeper.observe(sample.sequence, sample.values[: self._words], step)

    def _read(self, copies: list[Sample], step: int) -> list[Violation]:
        found: list[Violation] = []
        for copy in copies:
            found += self.log.read(copy.values, step, self._sweeper.latest_id)
        self.alarmed = self._rows.busy or self.log.moved(self.violations)
        return found
