"""Compares slots beside the engine's own stream. A difference there is a suspicion, not yet a finding.

A slot may be rewritten while a scout reads it. So a scout counts into memory of its own, and whoever sent
it repeats a suspected comparison on the engine's stream, in order with every writer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from canary_kernels import layout
from canary_kernels.buffers import GroupBuffers
from canary_kernels.fingerprint import FingerprintPlan, compare_range
from canary_obs.pipeline.delayed_device_host import Event
from canary_obs.runtime.pump import Pump
from canary_obs.runtime.state import DeviceState, Group

_IN_FLIGHT = 4
_RUNS = layout.COUNT_RUNS + layout.Phase.PATROL


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """Slots of a group, to be compared."""

    group: Group
    slots: range
    first_chunk: int
    last_chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """An errand that came back."""

    errand: Errand
    ran: bool  # False = the kernel left no trace
    suspicious: bool


@dataclass(slots=True, kw_only=True)
class _UnderWay:
    errand: Errand
    run: int  # the number of its group's runs once this one is counted
    passed: Event | None  # the device is through with it; None = it was when the launch returned
    copy: int | None = None  # sequence of the first copy of the counters that was pushed after that
    suspected: bool = False  # counts moved that may be those of this errand or of one before it


class Scout:
    """Sends comparisons on a stream of its own, at most a few at a time; never waits for the device.

    What they count comes to the host with the pump's copies, so an errand costs one launch and no more.
    `event_factory` stands in for the device's events.
    """

    def __init__(
        self, state: DeviceState, pump: Pump, event_factory: Callable[[], Event] | None = None
    ) -> None:
        device = state.clock.device
        self._state, self._pump = state, pump
        # Of its own, as all that two streams write at once: the log, the clock that stamps it, sums in wait.
        log = torch.zeros((layout.NUM_LANES, 2, layout.ROW_WORDS), dtype=torch.int64, device=device)
        clock = torch.ones(1, dtype=torch.int64, device=device)
        counters = state.beside.view(-1, layout.COUNTER_WORDS)
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
        self._stream: torch.Stream | None = None
        if device.type == "cuda":
            # The lowest priority there is; it is also the default one of an engine's own streams.
            self._stream = torch.Stream(device, priority=0)
            event_factory = event_factory or partial(torch.Event, device)
        made = (
            [event_factory() for _ in range(_IN_FLIGHT)] if event_factory is not None else [None] * _IN_FLIGHT
        )
        self._events: deque[Event | None] = deque(made)
        self._under_way: deque[_UnderWay] = deque()
        rows = counters.tolist()
        self._runs = [row[_RUNS] for row in rows]  # by group: counted, once all that was sent has run
        self._lanes = [row[: layout.NUM_LANES] for row in rows]  # by group: suspicions seen

    @property
    def full(self) -> bool:
        """Whether as many errands are under way as there may be."""
        return not self._events

    @property
    def busy(self) -> bool:
        """Whether errands are under way."""
        return bool(self._under_way)

    def send(self, errand: Errand) -> None:
        """Start an errand's comparison. Only when not full."""
        group = errand.group
        buffers, plan = self._sides[group.index]
        compare_range(self._state.backend, buffers, plan, errand.slots, layout.Phase.PATROL, self._stream)
        event = self._events.popleft()
        if event is not None:
            event.record(self._stream)  # on a GPU, where there is one
        self._runs[group.index] += 1
        self._under_way.append(_UnderWay(errand=errand, run=self._runs[group.index], passed=event))

    def returned(self) -> Iterator[Return]:
        """Errands whose counts are on the host, oldest first."""
        for one in self._under_way:
            if one.passed is None or one.copy is not None:
                continue
            if not one.passed.query():
                break
            one.copy = self._pump.next_sequence
        newest = self._pump.sample
        while self._under_way:
            oldest = self._under_way[0]
            if oldest.passed is None:
                counted = self._state.beside.tolist()
            elif oldest.copy is not None and newest is not None and newest.sequence >= oldest.copy:
                counted = self._pump.beside
            else:
                return
            yield self._judged(self._under_way.popleft(), counted)

    def finish(self) -> Iterator[Return]:
        """At rest: wait for the errands that are under way."""
        if self._stream is not None:
            self._stream.synchronize()
        counted = self._state.beside.tolist()
        while self._under_way:
            yield self._judged(self._under_way.popleft(), counted)

    def _judged(self, one: _UnderWay, counted: Sequence[int]) -> Return:
        """counted: int64 [groups * COUNTER_WORDS], read when the device was through with this errand."""
        self._events.append(one.passed)
        number = one.errand.group.index
        start = number * layout.COUNTER_WORDS
        lanes = counted[start : start + layout.NUM_LANES]
        later = [other for other in self._under_way if other.errand.group.index == number]
        suspicious = one.suspected
        if lanes != self._lanes[number]:
            self._lanes[number], suspicious = lanes, True
            # Errands sent after this one may have counted already: they are repeated as well.
            for other in later:
                other.suspected = True
        missing = max(0, one.run - counted[start + _RUNS])
        # One lost run is one finding: those behind it are not to miss it again.
        self._runs[number] -= missing
        for other in later:
            other.run -= missing
        return Return(errand=one.errand, ran=not missing, suspicious=suspicious)
