"""A bounded history of numbered events; a client's stream is a position in it.

sse-starlette 3.7 was considered: it would replace the framing and the heartbeat, about 20 lines of
routes/events.py. It has no history, Last-Event-ID or limit of streams, and it detects shutdown by patching
uvicorn's signal handler for the whole process, which a server in a thread does not use.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from enum import StrEnum

import msgspec

from canary_obs.hub.hub import Hub
from canary_obs.hub.sweep_records import SweepVersion
from canary_obs.hub.sweeps import RECORDS_KEPT
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.records import Identity, RankKey
from canary_obs.vocabulary import State, SweepStatus

EVENTS_KEPT = 2048  # of violations, and of all other events
POLL_SECONDS = 0.25
PROGRESS_SECONDS = 1.0  # between two events of one sweep's progress


class EventKind(StrEnum):
    """The `event` field of a server-sent event."""

    STATE = "state"
    VIOLATION = "violation"
    INCIDENT_OPENED = "incident_opened"
    INCIDENT_CLOSED = "incident_closed"
    TAINTED = "tainted"
    HEAL = "heal"
    SWEEP_BEGUN = "sweep_begun"
    SWEEP_PROGRESS = "sweep_progress"
    SWEEP_ENDED = "sweep_ended"
    DROPPED = "dropped"


class StateChange(msgspec.Struct, frozen=True, kw_only=True):
    """A new state; `identity` None = the verdict over all ranks, `before` None = at the first poll."""

    identity: Identity | None
    before: State | None
    state: State
    reasons: tuple[str, ...]
    time_ns: int


class SweepAdvance(msgspec.Struct, frozen=True, kw_only=True):
    """How far a running sweep is, over all of its ranks."""

    id: str
    status: SweepStatus
    paused: bool
    total: int
    checked: int
    violations: int
    slots_per_second: float | None
    eta_seconds: float | None
    ranks_by_status: dict[SweepStatus, int]


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """Events that this stream will not receive; `count` None = unknown, as the service has restarted."""

    count: int | None


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event; `number` counts up from 1, and is 0 for an event of a single stream, outside the history."""

    number: int
    kind: EventKind
    data: msgspec.Struct


class EventStream:
    """A hub subscriber that keeps the history. Open streams call `poll`; without any, nothing polls."""

    def __init__(self, hub: Hub, clock: Callable[[], float] = time.monotonic) -> None:
        self._hub, self._clock = hub, clock
        self._lock = threading.Lock()
        # Kept apart, so that a flood of violations does not push out state changes.
        self._violations: deque[StreamEvent] = deque(maxlen=EVENTS_KEPT)
        self._others: deque[StreamEvent] = deque(maxlen=EVENTS_KEPT)
        self._polled_at = float("-inf")
        self._states: dict[RankKey | None, State] = {}
        self._incidents: dict[str, int | None] = {}  # closed_ns by incident id
        self._sweeps: dict[str, SweepVersion] = {}
        self._progress: OrderedDict[str, SweepAdvance] = OrderedDict()  # the latest published, by sweep id
        self._progress_at = float("-inf")
        self._taints = self._heals = 0  # numbers of the newest ones that are published
        self.epoch = secrets.token_hex(4)  # part of event ids: numbers start again with each process
        self.last_number = 0
        self.open_streams = 0
        self.closed = False

    def __call__(self, events: tuple[ViolationEvent, ...]) -> None:
        """Publish new violations; never blocks."""
        for event in events:
            self._publish(self._violations, EventKind.VIOLATION, event)

    def close(self) -> None:
        """End all streams, each at its next poll."""
        self.closed = True

    def poll(self) -> None:
        """Publish what has changed in the hub since the last poll, at most once per POLL_SECONDS / 2."""
        now = self._clock()
        if now - self._polled_at < POLL_SECONDS / 2:
            return
        self._polled_at = now
        self._publish_sweeps()
        self._publish_progress(now)
        self._publish_incidents()
        self._publish_taints()
        self._publish_heals()
        self._publish_states()

    def current_state(self) -> StreamEvent:
        """The verdict over all ranks now, as the first event of a new stream."""
        state, reasons = self._hub.verdict()
        change = StateChange(identity=None, before=None, state=state, reasons=reasons, time_ns=time.time_ns())
        return StreamEvent(number=0, kind=EventKind.STATE, data=change)

    def after(self, number: int) -> list[StreamEvent]:
        """Every kept event with a higher number, in order, after a DROPPED if some are no longer kept."""
        with self._lock:
            kept = [event for events in (self._violations, self._others) for event in _newer(events, number)]
            lost = self.last_number - number - len(kept)
        kept.sort(key=lambda event: event.number)
        return [dropped(lost), *kept] if lost else kept

    def _publish(self, events: deque[StreamEvent], kind: EventKind, data: msgspec.Struct) -> None:
        with self._lock:
            self.last_number += 1
            events.append(StreamEvent(number=self.last_number, kind=kind, data=data))

    def _publish_sweeps(self) -> None:
        # Only changed ones are read: copying all sweeps of a large fleet takes the hub 24 ms.
        for record in reversed(self._hub.sweeps(self._sweeps)):
            if record.id not in self._sweeps:
                self._publish(self._others, EventKind.SWEEP_BEGUN, record)
            # May happen again: a rank that joins late reopens a sweep.
            if record.ended_ns is not None:
                self._publish(self._others, EventKind.SWEEP_ENDED, record)
            self._sweeps[record.id] = record.version
        while len(self._sweeps) > 2 * RECORDS_KEPT:
            del self._sweeps[next(iter(self._sweeps))]

    def _publish_progress(self, now: float) -> None:
        if now - self._progress_at < PROGRESS_SECONDS:
            return
        self._progress_at = now
        for record in self._hub.running_sweeps():
            advance = SweepAdvance(
                id=record.id, status=record.status, paused=record.paused, total=record.total,
                checked=record.checked, violations=record.violations,
                slots_per_second=record.slots_per_second, eta_seconds=record.eta_seconds,
                ranks_by_status=record.ranks_by_status,
            )  # fmt: skip
            if self._progress.get(record.id) != advance:
                self._progress[record.id] = advance
                self._publish(self._others, EventKind.SWEEP_PROGRESS, advance)
            self._progress.move_to_end(record.id)
        while len(self._progress) > RECORDS_KEPT:
            self._progress.popitem(last=False)

    def _publish_incidents(self) -> None:
        incidents = self._hub.incidents.newest_first()
        for incident in reversed(incidents):
            if incident.id not in self._incidents:
                self._publish(self._others, EventKind.INCIDENT_OPENED, incident)
            if incident.closed_ns is not None and self._incidents.get(incident.id) is None:
                self._publish(self._others, EventKind.INCIDENT_CLOSED, incident)
        self._incidents = {incident.id: incident.closed_ns for incident in incidents}

    def _publish_taints(self) -> None:
        for taint in self._hub.taints.after(self._taints):
            self._publish(self._others, EventKind.TAINTED, taint)
            self._taints = taint.number

    def _publish_heals(self) -> None:
        for heal in self._hub.heals.after(self._heals):
            self._publish(self._others, EventKind.HEAL, heal)
            self._heals = heal.number

    def _publish_states(self) -> None:
        state, reasons = self._hub.verdict()
        states: list[tuple[Identity | None, State, tuple[str, ...]]] = [(None, state, reasons)]
        states += [(rank.identity, rank.state, rank.reasons) for rank in self._hub.ranks()]
        for identity, now, why in states:
            before = self._states.get(_key(identity))
            if before is not now:
                change = StateChange(
                    identity=identity, before=before, state=now, reasons=why, time_ns=time.time_ns()
                )
                self._publish(self._others, EventKind.STATE, change)
        self._states = {_key(identity): now for identity, now, _ in states}


def dropped(count: int | None) -> StreamEvent:
    """The event that replaces those which a stream will not receive."""
    return StreamEvent(number=0, kind=EventKind.DROPPED, data=Dropped(count=count))


def _key(identity: Identity | None) -> RankKey | None:
    return None if identity is None else identity.key


def _newer(events: deque[StreamEvent], number: int) -> Iterator[StreamEvent]:
    for event in reversed(events):
        if event.number <= number:
            return
        yield event
