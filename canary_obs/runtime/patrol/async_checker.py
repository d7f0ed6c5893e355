"""Compares slots beside the engine's own stream. A difference there is a suspicion, not yet a finding.

A slot may be rewritten while a scout reads it. So a scout counts into memory of its own, and whoever sent
it repeats a suspected comparison on the engine's stream, in order with every writer.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from canary_kernels import layout
from canary_kernels.buffers import GroupBuffers
from canary_kernels.fingerprint import FingerprintPlan, range_comparison
from canary_obs.runtime.device.counter_reader import CounterReader
from canary_obs.runtime.device.state import DeviceState, Group

_IN_FLIGHT = 4
_RUNS = layout.COUNT_RUNS + layout.Phase.PATROL
_WORD = 8  # bytes
_LANES, _RUN = slice(layout.NUM_LANES * _WORD), slice(_RUNS * _WORD, (_RUNS + 1) * _WORD)


class ScanJob(NamedTuple):
    """Slots of a group, to be compared."""

    group: Group
    slots: range
    first_chunk: int
    last_chunk: int


class Return(NamedTuple):
    """An errand that came back."""

    job: ScanJob
    ran: bool  # False = the kernel left no trace
    suspicious: bool


class Beside(Protocol):
    """A stream of its own, as much of it as is used here."""

    def query(self) -> bool:
        """Whether all that was launched there is done. Never waits."""

    def synchronize(self) -> None:
        """Wait for it."""


class Done:
    """The CPU's: what was launched is done."""

    def query(self) -> bool:
        """Always done."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


@dataclass(slots=True, kw_only=True)
class _UnderWay:
    job: ScanJob
    run: int  # the number of its group's runs once this one is counted
    copy: int = -1  # sequence of the first copy of the counters pushed after it was done; -1 = not yet known
    suspected: bool = False  # counts moved that may be those of this errand or of one before it


class AsyncChecker:
    """Sends comparisons on a stream of its own, at most a few at a time; never waits for the device.

    What they count comes to the host with the pump's copies, so an errand costs one launch and no more.
    """

    def __init__(self, state: DeviceState, counter_reader: CounterReader) -> None:
        device = state.clock.device
        self._state, self._pump = state, counter_reader
        # Of its own, as all that two streams write at once: the log, the clock that stamps it, sums in wait.
        log = torch.zeros((layout.NUM_LANES, 2, layout.ROW_WORDS), dtype=torch.int64, device=device)
        clock = torch.ones(1, dtype=torch.int64, device=device)
        counters = state.side_counters.view(-1, layout.COUNTER_WORDS)
        self._sides: list[tuple[GroupBuffers, FingerprintPlan]] = [
            (
                GroupBuffers(
                    records=group.buffers.records,
                    counters=counters[group.index],
                    violations=log,
                    clock=clock,
                ),
                replace(group.plan, scratch=None if (sums := group.plan.scratch) is None else sums.clone()),
            )
            for group in state.groups
        ]
        # The lowest priority there is; it is also the default one of an engine's own streams.
        stream = torch.Stream(device, priority=0) if device.type == "cuda" else None
        self._stream: Beside = Done() if stream is None else stream
        self._compare = [
            range_comparison(state.backend, *side, layout.Phase.PATROL, stream) for side in self._sides
        ]
        self._stream.synchronize()
        rows = counters.cpu().numpy()
        self._runs = [int(row[_RUNS]) for row in rows]  # by group: counted, once all that was sent has run
        self._lanes = [row.tobytes()[_LANES] for row in rows]  # by group: suspicions seen
        self._under_way: deque[_UnderWay] = deque()

    @property
    def full(self) -> bool:
        """Whether as many errands are under way as there may be."""
        return len(self._under_way) == _IN_FLIGHT

    @property
    def busy(self) -> bool:
        """Whether errands are under way."""
        return bool(self._under_way)

    def send(self, job: ScanJob) -> None:
        """Start an errand's comparison. Only when not full."""
        number = job.group.index
        self._compare[number](job.slots)
        self._runs[number] += 1
        self._under_way.append(_UnderWay(job=job, run=self._runs[number]))

    def look(self) -> bool:
        """Whether the device has got through with what was sent since the last look."""
        # With all of it at once: one event each would cost the engine's thread as much as the launches.
        if not self._under_way or self._under_way[-1].copy >= 0 or not self._stream.query():
            return False
        for one in self._under_way:
            one.copy = self._pump.next_sequence if one.copy < 0 else one.copy
        return True

    def returned(self) -> list[Return]:
        """Errands whose counts are on the host, oldest first."""
        back: list[Return] = []
        while self._under_way and 0 <= self._under_way[0].copy <= self._pump.newest_sequence:
            back.append(self._judged(self._under_way.popleft(), self._pump.side_counters_of))
        return back

    def finish(self) -> Iterator[Return]:
        """At rest: wait for the errands that are under way."""
        self._stream.synchronize()
        counted = self._state.side_counters.cpu().numpy()

        def row_of(number: int) -> bytes:
            start = number * layout.COUNTER_WORDS
            return counted[start : start + layout.COUNTER_WORDS].tobytes()

        while self._under_way:
            yield self._judged(self._under_way.popleft(), row_of)

    def _judged(self, one: _UnderWay, row_of: Callable[[int], bytes]) -> Return:
        """row_of: a group's counters, int64 [COUNTER_WORDS], read when the device was through with it."""
        number = one.job.group.index
        row = row_of(number)
        lanes, ran = row[_LANES], int.from_bytes(row[_RUN], sys.byteorder)
        later = [other for other in self._under_way if other.job.group.index == number]
        suspicious = one.suspected
        if lanes != self._lanes[number]:
            self._lanes[number], suspicious = lanes, True
            # Errands sent after this one may have counted already: they are repeated as well.
            for other in later:
                other.suspected = True
        missing = max(0, one.run - ran)
        # One lost run is one finding: those behind it are not to miss it again.
        self._runs[number] -= missing
        for other in later:
            other.run -= missing
        return Return(one.job, not missing, suspicious)
