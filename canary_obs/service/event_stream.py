"""What happened, as a bounded history of numbered events; every stream is a place in it and nothing more."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

import msgspec

from canary_obs.hub.hub import Hub
from canary_obs.hub.sweeps import RECORDS_KEPT
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.records import Identity
from canary_obs.vocabulary import State

EVENTS_KEPT = 2048  # violations, and everything else, each
LOOK_SECONDS = 0.25


class FeedKind(StrEnum):
    """What an event tells."""

    STATE = "state"
    VIOLATION = "violation"
    INCIDENT_OPENED = "incident_opened"
    INCIDENT_CLOSED = "incident_closed"
    SWEEP_BEGUN = "sweep_begun"
    SWEEP_ENDED = "sweep_ended"
    DROPPED = "dropped"


class StateChange(msgspec.Struct, frozen=True, kw_only=True):
    """A state as it is now; `identity` None = the verdict over all ranks, `before` None = the first look."""

    identity: Identity | None
    before: State | None
    state: State
    reasons: tuple[str, ...]
    time_ns: int


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """Events that this stream will not get; `count` None = unknown, the service has restarted since."""

    count: int | None


class FeedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event; `number` counts up from 1, and is 0 for what only one stream is told."""

    number: int
    kind: FeedKind
    data: msgspec.Struct


class EventStream:
    """A hub subscriber. Whoever streams calls `look` now and then; without streams nothing is looked at."""

    def __init__(self, hub: Hub, clock: Callable[[], float] = time.monotonic) -> None:
        self._hub, self._clock = hub, clock
        self._lock = threading.Lock()
        # Apart, so that a flood of violations never hides a change of state.
        self._violations: deque[FeedEvent] = deque(maxlen=EVENTS_KEPT)
        self._others: deque[FeedEvent] = deque(maxlen=EVENTS_KEPT)
        self._looked = float("-inf")
        self._states: dict[tuple[str, str, int] | None, State] = {}
        self._incidents: dict[str, int | None] = {}  # when they closed
        self._sweeps: dict[str, int | None] = {}  # when they ended
        self.life = secrets.token_hex(4)  # numbers of another life mean nothing in this one
        self.last = 0
        self.streams = 0
        self.closed = False

    def __call__(self, events: tuple[ViolationEvent, ...]) -> None:
        """Take in new violations; never blocks."""
        for event in events:
            self._publish(self._violations, FeedKind.VIOLATION, event)

    def close(self) -> None:
        """Streams end at their next look."""
        self.closed = True

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Counts a stream while it lasts."""
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1

    def look(self) -> None:
        """Publish what has changed in the hub since the last look, at most once per half LOOK_SECONDS."""
        now = self._clock()
        if now - self._looked < LOOK_SECONDS / 2:
            return
        self._looked = now
        self._look_at_sweeps()
        self._look_at_incidents()
        self._look_at_states()

    def verdict(self) -> FeedEvent:
        """The state now, for a stream that begins."""
        state, reasons = self._hub.verdict()
        change = StateChange(identity=None, before=None, state=state, reasons=reasons, time_ns=time.time_ns())
        return FeedEvent(number=0, kind=FeedKind.STATE, data=change)

    def after(self, number: int) -> list[FeedEvent]:
        """Every event kept with a higher number, in order; first a DROPPED if some are kept no more."""
        with self._lock:
            kept = [event for ring in (self._violations, self._others) for event in _newer(ring, number)]
            lost = self.last - number - len(kept)
        kept.sort(key=lambda event: event.number)
        return [dropped(lost), *kept] if lost else kept

    def _publish(self, ring: deque[FeedEvent], kind: FeedKind, data: msgspec.Struct) -> None:
        with self._lock:
            self.last += 1
            ring.append(FeedEvent(number=self.last, kind=kind, data=data))

    def _look_at_sweeps(self) -> None:
        # Only what has changed: all sweeps of a large fleet take the hub 24 ms to tell.
        for record in reversed(self._hub.sweeps(self._sweeps)):
            if record.id not in self._sweeps:
                self._publish(self._others, FeedKind.SWEEP_BEGUN, record)
            # A rank that joins late opens a sweep again.
            if record.ended_ns is not None:
                self._publish(self._others, FeedKind.SWEEP_ENDED, record)
            self._sweeps[record.id] = record.ended_ns
        while len(self._sweeps) > 2 * RECORDS_KEPT:
            del self._sweeps[next(iter(self._sweeps))]

    def _look_at_incidents(self) -> None:
        cases = self._hub.incidents.newest_first()
        for case in reversed(cases):
            if case.id not in self._incidents:
                self._publish(self._others, FeedKind.INCIDENT_OPENED, case)
            if case.closed_ns is not None and self._incidents.get(case.id) is None:
                self._publish(self._others, FeedKind.INCIDENT_CLOSED, case)
        self._incidents = {case.id: case.closed_ns for case in cases}

    def _look_at_states(self) -> None:
        state, reasons = self._hub.verdict()
        seen: list[tuple[Identity | None, State, tuple[str, ...]]] = [(None, state, reasons)]
        seen += [(rank.identity, rank.state, rank.reasons) for rank in self._hub.ranks()]
        for identity, now, why in seen:
            before = self._states.get(_key(identity))
            if before is not now:
                change = StateChange(
                    identity=identity, before=before, state=now, reasons=why, time_ns=time.time_ns()
                )
                self._publish(self._others, FeedKind.STATE, change)
        self._states = {_key(identity): now for identity, now, _ in seen}


def dropped(count: int | None) -> FeedEvent:
    """What a stream is told in place of events it will not get."""
    return FeedEvent(number=0, kind=FeedKind.DROPPED, data=Dropped(count=count))


def _key(identity: Identity | None) -> tuple[str, str, int] | None:
    return None if identity is None else identity.key


def _newer(ring: deque[FeedEvent], number: int) -> Iterator[FeedEvent]:
    for event in reversed(ring):
        if event.number <= number:
            return
        yield event
