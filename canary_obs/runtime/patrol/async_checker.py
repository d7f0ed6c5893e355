"""Compares slots on a stream of its own. A difference found there is a suspicion, not yet a violation.

A slot may be rewritten while the stream reads it. The checker therefore counts into memory of its own, and
its caller repeats suspicious comparisons on the engine's stream, in order with every write.
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

_MAX_IN_FLIGHT = 4
_RUNS = layout.COUNT_RUNS + layout.Phase.PATROL
_WORD = 8  # bytes
_LANES, _RUN = slice(layout.NUM_LANES * _WORD), slice(_RUNS * _WORD, (_RUNS + 1) * _WORD)
_HASHED, _UNHASHED = (count + layout.Phase.PATROL for count in (layout.COUNT_HASHED, layout.COUNT_UNHASHED))


class ScanJob(NamedTuple):
    """Slots of one group to be compared with their fingerprints."""

    group: Group
    slots: range
    first_chunk: int  # of the patrol
    last_chunk: int
    step: int  # forwards up to this one were over when the job was chosen; -1 = not known of any


class ScanResult(NamedTuple):
    """How a job ended."""

    job: ScanJob
    ran: bool  # False = the kernel's run counter did not advance, or it counted fewer slots than it was given
    missing: int  # slots given that it did not count
    suspicious: bool  # violations were counted, by this job or by one in flight with it


class CheckStream(Protocol):
    """What is used of a torch.Stream."""

    def query(self) -> bool:
        """Whether everything launched on it is done. Never waits."""

    def synchronize(self) -> None:
        """Wait until everything launched on it is done."""


class SynchronousStream:
    """Stands for a stream on the CPU, where a launch returns when its work is done."""

    def query(self) -> bool:
        """Always done."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


@dataclass(slots=True, kw_only=True)
class _InFlight:
    job: ScanJob
    run: int  # value of the group's run counter once this job is counted
    slots: int  # likewise, of slots counted
    copy: int = -1  # sequence of the first copy of the counters pushed after it was done; -1 = not done yet
    suspicious: bool = False  # counters moved that may be this job's or an earlier one's


class AsyncChecker:
    """Keeps a few jobs in flight; never waits for the device.

    Results come to the host with the CounterReader's copies, so that a job costs a single launch.
    """

    def __init__(self, state: DeviceState, counter_reader: CounterReader) -> None:
        device = state.clock.device
        self._state, self._counter_reader = state, counter_reader
        # Everything that two streams would write at once is the checker's own: log, clock, partial sums. Each
        # slot has one program, also where its rows are long: nobody waits; the engine has the rest.
        log = torch.zeros((layout.NUM_LANES, 2, layout.ROW_WORDS), dtype=torch.int64, device=device)
        clock = torch.ones(1, dtype=torch.int64, device=device)
        counters = state.side_counters.view(-1, layout.COUNTER_WORDS)
        self._side_buffers: list[tuple[GroupBuffers, FingerprintPlan]] = [
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
        self._stream: CheckStream = SynchronousStream() if stream is None else stream
        self._compare = [
            range_comparison(state.backend, *side, layout.Phase.PATROL, stream) for side in self._side_buffers
        ]
        self._stream.synchronize()
        rows = counters.cpu().numpy()
        self._runs = [int(row[_RUNS]) for row in rows]  # by group: expected once all jobs have run
        self._slots = [_slots_of(row.tobytes()) for row in rows]  # likewise
        self._lanes = [row.tobytes()[_LANES] for row in rows]  # by group: as of the last result
        self._in_flight: deque[_InFlight] = deque()

    @property
    def full(self) -> bool:
        """Whether as many jobs are in flight as are allowed."""
        return len(self._in_flight) == _MAX_IN_FLIGHT

    @property
    def busy(self) -> bool:
        """Whether jobs are in flight."""
        return bool(self._in_flight)

    def submit(self, job: ScanJob) -> None:
        """Launch a job's comparison. Only when not full."""
        number = job.group.index
        self._compare[number](job.slots)
        self._runs[number] += 1
        self._slots[number] += len(job.slots)
        self._in_flight.append(_InFlight(job=job, run=self._runs[number], slots=self._slots[number]))

    def poll(self) -> bool:
        """Note that the device has completed all jobs; returns False if it has not, or nothing is new."""
        # All jobs at once: an event for each would cost the engine's thread as much as the launches.
        if not self._in_flight or self._in_flight[-1].copy >= 0 or not self._stream.query():
            return False
        for flight in self._in_flight:
            flight.copy = self._counter_reader.next_sequence if flight.copy < 0 else flight.copy
        return True

    def results(self) -> list[ScanResult]:
        """Results of the jobs whose counters are on the host, oldest first."""
        results: list[ScanResult] = []
        newest = self._counter_reader.newest_sequence
        while self._in_flight and 0 <= self._in_flight[0].copy <= newest:
            results.append(self._result(self._in_flight.popleft(), self._counter_reader.side_counters_of))
        return results

    def wait(self) -> Iterator[ScanResult]:
        """Wait for the jobs in flight; the engine must be at rest."""
        self._stream.synchronize()
        counters = self._state.side_counters.cpu().numpy()

        def row_of(number: int) -> bytes:
            start = number * layout.COUNTER_WORDS
            return counters[start : start + layout.COUNTER_WORDS].tobytes()

        while self._in_flight:
            yield self._result(self._in_flight.popleft(), row_of)

    def _result(self, done: _InFlight, row_of: Callable[[int], bytes]) -> ScanResult:
        """`row_of(group)`: its side counters, int64 [COUNTER_WORDS], read after the job was done."""
        number = done.job.group.index
        row = row_of(number)
        lanes, ran = row[_LANES], int.from_bytes(row[_RUN], sys.byteorder)
        later = [flight for flight in self._in_flight if flight.job.group.index == number]
        suspicious = done.suspicious
        if lanes != self._lanes[number]:
            self._lanes[number], suspicious = lanes, True
            # Jobs submitted after this one may have counted already: they are repeated as well.
            for flight in later:
                flight.suspicious = True
        lost_run, lost_slots = max(0, done.run - ran), max(0, done.slots - _slots_of(row))
        # What is lost is reported once: jobs after it must not miss it again.
        self._runs[number] -= lost_run
        self._slots[number] -= lost_slots
        for flight in later:
            flight.run -= lost_run
            flight.slots -= lost_slots
        return ScanResult(done.job, not (lost_run or lost_slots), lost_slots, suspicious)


def _slots_of(row: bytes) -> int:
    """Slots that a group's comparisons counted, by its side counters, int64 [COUNTER_WORDS]."""
    return sum(
        int.from_bytes(row[word * _WORD : (word + 1) * _WORD], sys.byteorder) for word in (_HASHED, _UNHASHED)
    )
