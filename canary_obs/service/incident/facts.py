"""What may be said of a finding: its own row, and evidence that still shows the slot as it was then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from canary_obs.hub.incidents import Incident
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.records import Evidence, Violation
from canary_obs.slot_facts import ChangedWord, SlotEvent
from canary_obs.vocabulary import Phase, Reason, SlotEventKind

# Of the findings of one step, these say less, and less from left to right: they follow from others.
_FOLLOWING = (Reason.UNWRITTEN, Reason.POSITION, Reason.WRITE_TOKEN, Reason.TOKEN, Reason.CHAIN)
_BY_REQUEST = frozenset({Phase.HEAD, Phase.TAIL})  # checks of one request's row; others look at slots alone
_OF_ROWS = frozenset(
    {Reason.CHAIN, Reason.POSITION, Reason.TOKEN, Reason.UNWRITTEN, Reason.WRITE_TOKEN, Reason.WRITE_POSITION}
)
_WORD = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A finding with what is known of its slot; None = not known, or no longer as it was."""

    event: ViolationEvent
    evidence: Evidence | None

    @property
    def row(self) -> Violation:
        """The violation."""
        return self.event.violation

    @property
    def reader(self) -> str | None:
        """The request whose row was checked; None = unknown, or the check was of slots alone."""
        row = self.row
        # Where no row is known, the engine names all that use the slot: "r1,r2".
        named = row.request is not None and "," not in row.request
        return row.request if named and row.phase in _BY_REQUEST and row.reason in _OF_ROWS else None

    @property
    def users(self) -> tuple[str, ...] | None:
        """Running requests that used the slot when it was read; None = not known."""
        return None if self.evidence is None else self.evidence.holders

    @property
    def others(self) -> tuple[str, ...]:
        """Those of them that are not the reader; empty also when the reader is one, or is unknown."""
        users = self.users or ()
        return users if self.reader is not None and self.reader not in users else ()

    @property
    def written_step(self) -> int | None:
        """The step of the slot's last write before the finding."""
        steps = [event.step for event in self.writes if event.step <= self.row.step]
        return max(steps, default=None)

    @property
    def is_foreign(self) -> bool:
        """Whether the slot surely holds no context of the reader: it neither uses nor wrote it."""
        last = max(self.writes, key=lambda event: event.step, default=None)
        writers = () if last is None else last.requests
        if self.reader is None or self.users is None or not writers:
            return False
        return self.reader not in self.users and self.reader not in writers

    @property
    def writes(self) -> Iterable[SlotEvent]:
        """Writes in the slot's history."""
        history = () if self.evidence is None else self.evidence.history
        return [event for event in history if event.kind is SlotEventKind.WRITTEN]

    @property
    def changed(self) -> tuple[ChangedWord, ...]:
        """Words whose change explains the difference, with values."""
        if self.evidence is None:
            return ()
        return tuple(word for word in self.evidence.changed if word.original and word.current)

    @property
    def expected(self) -> int | None:
        """The expected value as a signed number; None where it is redacted."""
        return _number(self.row.expected)

    @property
    def actual(self) -> int | None:
        """The value found; None where it is redacted."""
        return _number(self.row.actual)


def lead_of(incident: Incident) -> Facts | None:
    """The finding that says most about what happened, of the first step with findings; None = no finding."""
    events = (*incident.first, *incident.latest)
    if not events:
        return None
    first = min(event.violation.step for event in events if event.identity == events[0].identity)
    there = [e for e in events if e.identity == events[0].identity and e.violation.step == first]
    there.sort(key=lambda event: (_order(event.violation.reason), event.number))
    known = [facts_of(incident, event) for event in there]
    same = [facts for facts in known if facts.row.reason is known[0].row.reason]
    return next((facts for facts in same if facts.evidence is not None), same[0])


def _order(reason: Reason) -> int:
    return _FOLLOWING.index(reason) if reason in _FOLLOWING else -1


def facts_of(incident: Incident, event: ViolationEvent) -> Facts:
    """A finding with its slot's evidence, unless the slot may have changed between the two."""
    row = event.violation
    mine = [
        evidence
        for evidence in incident.evidence
        if evidence.identity == event.identity
        and (evidence.group, evidence.slot.slot) == (row.group, row.slot)
        and not _is_late(evidence, row)
    ]
    return Facts(event=event, evidence=mine[0] if mine else None)


def _is_late(evidence: Evidence, row: Violation) -> bool:
    if evidence.prompted or evidence.step < row.step:
        return True
    if row.reason is Reason.POSITION and evidence.slot.position != _number(row.actual):
        return True
    # Written or discarded after the finding: what lies there now is something else.
    return any(event.step > row.step for event in evidence.history)


def _number(word: str | None) -> int | None:
    if word is None:
        return None
    try:
        value = int(word, 16)
    except ValueError:
        return None
    return value - _WORD if value >= _WORD >> 1 else value
