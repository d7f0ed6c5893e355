"""Notices when no copy of the counters reaches the host any more."""

from __future__ import annotations

import time

from canary_obs.runtime.device.counter_reader import CounterReader
from canary_obs.runtime.run_state import RunState
from canary_obs.vocabulary import State

STALE_SECONDS = 5.0
STALE_STEPS = 36  # copies leave at least every twelfth forward on a GPU, and after each one on a CPU


class CounterAge:
    """A ReasonSource. The pipeline's lag is that of copies in flight; this asks for the last that arrived."""

    def __init__(self, counter_reader: CounterReader, run: RunState) -> None:
        self._reader, self._run = counter_reader, run

    def reasons(self) -> list[tuple[State, str]]:
        """Blind when the engine went on without a newer copy, for too long and for too many forwards."""
        run, newest = self._run, self._reader.sample
        if not run.armed:
            return []
        age = time.monotonic() - (run.ready_at if newest is None else newest.pushed)
        steps = run.step - (0 if newest is None else newest.step)
        if age <= STALE_SECONDS or steps < STALE_STEPS:
            return []
        text = f"the newest counters from the device are {age:.0f} s and {steps} forwards old"
        return [(State.BLIND, text)]
