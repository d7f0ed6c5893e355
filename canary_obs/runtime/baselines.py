"""Fingerprints adopted slots in the background, and counts the slots that have no history.

An adopted slot was live before the canary, or its history was lost. A pass over all records gives each of
them a baseline, within a budget and in order with every writer; its results come with a copy of the counters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from canary_kernels import layout
from canary_kernels.fingerprint import baseline_range
from canary_obs.runtime.device.delayed_device_host import Sample
from canary_obs.runtime.device.state import DeviceState, Group
from canary_obs.vocabulary import SlotState

_CPU_CHUNK = 256  # slots
_DEVICE_CHUNK_BYTES = 1 << 30
CENSUS_SECONDS = 5.0  # between passes when nothing was adopted: they count, and find nothing to fingerprint
COUNTED = SlotState.ADOPTED, SlotState.BASELINE, SlotState.AWAITED


class Baselines:
    """One pass at a time. A slot adopted during a pass is left to the next one."""

    def __init__(
        self, state: DeviceState, bandwidth: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`bandwidth` in bytes per second: what a chunk takes of a GPU's time."""
        self._state, self._bandwidth, self._clock = state, bandwidth, clock
        self._on_cpu = state.clock.device.type == "cpu"
        self._chunks: Iterator[tuple[Group, range]] | None = None  # of the pass under way, yet to be launched
        self._settles_at = -1  # sequence of the first copy with the pass's results; -1 = not all launched
        self._passing = 0  # adoptions before the pass began
        self._covered = 0  # adoptions before the last complete pass began
        self._launched = [0] * len(state.groups)  # runs of passes
        self._others = [0] * len(state.groups)  # runs for bytes that had arrived by the end of the pass
        self._before = [[0] * len(COUNTED) for _ in state.groups]
        self._ended = float("-inf")
        self.visited = 0  # slots of the pass under way
        self.missing_runs = 0  # launched and not counted
        self.found: dict[str, dict[SlotState, int]] = {}  # by group, as of the last complete pass

    @property
    def waiting(self) -> bool:
        """Whether slots were adopted that no complete pass has visited."""
        return self._state.adoptions.count > self._covered

    @property
    def due(self) -> bool:
        """Whether `advance` has something to launch."""
        if self._settles_at >= 0:
            return False
        return self._chunks is not None or self.waiting or self._clock() - self._ended > CENSUS_SECONDS

    def advance(self, budget_seconds: float, next_sequence: int) -> None:
        """Launch chunks for `budget_seconds`, of host time or of estimated device time, at least one.

        Call on a stream in order with every writer. `next_sequence` is that of the next counter copy.
        """
        if not self.due:
            return
        if self._chunks is None:
            self._passing, self.visited = self._state.adoptions.count, 0
            self._chunks = self._all_chunks(whole=not self.waiting and not self._on_cpu)
        deadline = time.perf_counter() + budget_seconds
        for group, slots in self._chunks:
            baseline_range(group.backend, group.buffers, group.plan, slots)
            self._state.adoptions.others += 1
            self._launched[group.index] += 1
            self.visited += len(slots)
            if not self._on_cpu and self.waiting:
                deadline -= len(slots) * group.plan.bytes_per_slot / self._bandwidth
            if time.perf_counter() >= deadline:
                return
        self._chunks, self._settles_at = None, next_sequence
        self._others = [self._state.adoptions.baselines[group.index] for group in self._state.groups]

    def update(self, sample: Sample) -> None:
        """Take up a host copy of the counters."""
        if self._settles_at < 0 or sample.sequence < self._settles_at:
            return
        rows = sample.values[: self._state.counter_words].view(-1, layout.COUNTER_WORDS).tolist()
        for group, row in zip(self._state.groups, rows, strict=True):
            launched = self._launched[group.index] + self._others[group.index]
            # The copy may hold more: bytes that arrived between the pass and its push.
            missing = max(0, launched - row[layout.COUNT_BASELINE_RUNS])
            self.missing_runs += missing
            self._launched[group.index] -= missing  # one lost run is reported once
            now = [row[layout.COUNT_CENSUS + state.code] for state in COUNTED]
            before, self._before[group.index] = self._before[group.index], now
            self.found[group.name] = {
                state: new - old for state, new, old in zip(COUNTED, now, before, strict=True)
            }
        self._settles_at, self._covered, self._ended = -1, self._passing, self._clock()

    def _all_chunks(self, *, whole: bool) -> Iterator[tuple[Group, range]]:
        for group in self._state.groups:
            size = _CPU_CHUNK if self._on_cpu else _DEVICE_CHUNK_BYTES // max(1, group.plan.bytes_per_slot)
            size = group.view.num_slots if whole else max(1, size)
            for start in range(0, group.view.num_slots, size):
                yield group, range(start, min(start + size, group.view.num_slots))
