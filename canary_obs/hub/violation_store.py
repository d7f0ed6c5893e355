"""Recent violations of all ranks, numbered in order of arrival."""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from canary_obs.records import Identity, Violation, Violations
from canary_obs.vocabulary import Phase, Reason


class ViolationEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A violation and the rank that reported it. `number` counts from 1 since the service started."""

    number: int
    incident: str  # id
    identity: Identity
    violation: Violation


class ViolationFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects violations; None = any. `after` and `before` are event numbers, both exclusive."""

    reason: Reason | None = None
    phase: Phase | None = None
    group: str | None = None
    engine: str | None = None
    instance: str | None = None
    rank: int | None = None
    after: int | None = None
    before: int | None = None

    def matches(self, event: ViolationEvent) -> bool:
        """Whether an event is selected."""
        row, identity = event.violation, event.identity
        criteria = (
            (self.reason, row.reason),
            (self.phase, row.phase),
            (self.group, row.group),
            (self.engine, identity.engine),
            (self.instance, identity.instance),
            (self.rank, identity.rank),
        )
        return (
            all(wanted is None or wanted == actual for wanted, actual in criteria)
            and (self.after is None or event.number > self.after)
            and (self.before is None or event.number < self.before)
        )


class ViolationStore:
    """A bounded history. Not thread-safe: the hub holds its lock around every call."""

    def __init__(self, capacity: int) -> None:
        self._events: deque[ViolationEvent] = deque(maxlen=capacity)
        self.total = 0

    @property
    def evicted(self) -> int:
        """Events dropped for newer ones."""
        return self.total - len(self._events)

    def add(self, message: Violations, incident: str) -> tuple[ViolationEvent, ...]:
        """Number and store the violations of one message."""
        events = tuple(
            ViolationEvent(number=number, incident=incident, identity=message.identity, violation=row)
            for number, row in enumerate(message.rows, start=self.total + 1)
        )
        self._events.extend(events)
        self.total += len(events)
        return events

    def counts_after(self, number: int, identity: Identity) -> Counter[str]:
        """Kept events of one process with higher numbers, by incident; evicted ones were older."""
        counts: Counter[str] = Counter()
        for event in reversed(self._events):
            if event.number <= number:
                break
            if event.identity == identity:
                counts[event.incident] += 1
        return counts

    def newest_first(self) -> list[ViolationEvent]:
        """All kept events, newest first."""
        return list(reversed(self._events))
