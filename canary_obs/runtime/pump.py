"""Brings counters and violation rows to the host and hands each to those who wait for it."""

from __future__ import annotations

import time

from canary_obs.config import CanaryConfig
from canary_obs.pipeline.delayed_device_host import DelayedDeviceHost, Sample
from canary_obs.records import PipelineStatus, Violation
from canary_obs.runtime.health import Health
from canary_obs.runtime.state import DeviceState
from canary_obs.runtime.sweep import Sweeper
from canary_obs.runtime.violation_log import ViolationLog, events_in


class Pump:
    """Two delayed pipelines: counters every step, counters with the log when a violation counter moved."""

    def __init__(self, state: DeviceState, health: Health, sweeper: Sweeper, config: CanaryConfig) -> None:
        self._health, self._sweeper = health, sweeper
        # Half a kilobyte per group takes 2 us on the engine's stream; a side stream costs three more calls.
        self._counters = DelayedDeviceHost(state.all_counters, config.pipeline_rows, side_stream=False)
        self._rows = DelayedDeviceHost(state.flat, 2)
        self._words = state.counter_words
        self.log = ViolationLog(state, reveal_tokens=config.reveal_tokens)
        self.sample: Sample | None = None  # the newest host copy
        self._fetched: Sample | None = None  # arrived, not looked at yet
        # The same in two lists, [groups * COUNTER_WORDS] each; zeros before the first copy has arrived.
        self.counted = self.beside = [0] * self._words
        self.violations = 0  # counted up to the newest host copy

    @property
    def next_sequence(self) -> int:
        """Sequence of the next counter copy."""
        return self._counters.next_sequence

    @property
    def newest_sequence(self) -> int:
        """Sequence of the newest host copy; -1 before the first."""
        return -1 if self.sample is None else self.sample.sequence

    @property
    def busy(self) -> bool:
        """Whether anything is under way to the host, or is known to be there and was not fetched yet."""
        return self._counters.busy or self._fetched is not None or self.alarmed

    @property
    def alarmed(self) -> bool:
        """Whether there are violations whose rows were not read yet."""
        return self._rows.busy or self.log.moved(self.violations)

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
        return self.take(step)

    def push(self, step: int) -> None:
        """Start one copy of the counters; none while as many are under way as there may be."""
        sequence = self._counters.next_sequence
        if self._counters.push(step, time.monotonic()):
            self._health.expect(sequence)

    def fetch(self) -> None:
        """Take the newest copy that has arrived, for `take` to look at."""
        self._fetched = self._counters.newest() or self._fetched

    def take(self, step: int) -> list[Violation]:
        """Look at what was fetched; returns violations that became readable."""
        fetched, self._fetched = self._fetched, None
        self._take(fetched, step)
        if not self._rows.busy:
            if not self.log.moved(self.violations):
                return []
            self._rows.push(step, time.monotonic())
        return self._read(self._rows.poll(), step)

    def drain(self, step: int, timeout: float) -> list[Violation]:
        """At rest or at shutdown: wait up to `timeout` seconds for all that is known on the device."""
        found = self.turn(step)
        for sample in self._counters.flush(timeout):
            self._take(sample, step)
        found += self._read(self._rows.flush(timeout), step)
        if self.log.moved(self.violations):
            self._rows.push(step, time.monotonic())
            found += self._read(self._rows.flush(timeout), step)
        return found

    def _take(self, sample: Sample | None, step: int) -> None:
        # Counters only grow: the newest copy tells all that those before it did.
        if sample is not None:
            values = sample.words.tolist()
            self.sample, self.counted, self.beside = sample, values[: self._words], values[self._words :]
            self.violations = events_in(self.counted)
            self._health.observe(sample.sequence, self.counted)
            if self._sweeper.running:
                self._sweeper.observe(sample.sequence, sample.values[: self._words], step)

    def _read(self, copies: list[Sample], step: int) -> list[Violation]:
        found: list[Violation] = []
        for copy in copies:
            found += self.log.read(copy.values, step, self._sweeper.latest_id)
        return found
