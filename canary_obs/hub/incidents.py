"""An incident: a burst of violations of one engine instance, with an id that travels everywhere."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from canary_obs.heals import Heal
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.records import CollectEvidence, Evidence
from canary_obs.vocabulary import Phase, Reason

EVENTS_KEPT = 16  # per incident: as many of the first and of the latest
EVIDENCE_KEPT = 16
EVIDENCE_PER_LABEL_SET = 2  # slots requested per (rank, group, phase, reason)
SWEEPS_KEPT = 16
ACKNOWLEDGEMENTS_KEPT = 32
HEALS_KEPT = 64


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True):
    """An operator has seen violations of an incident."""

    id: str
    time_ns: int
    by: str | None
    comment: str | None
    ranks: tuple[int, ...]  # of this incident, that were not acknowledged before
    undone_ns: int | None = None


class IncidentSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of an incident. It closes after some time without violations, or when acknowledged."""

    id: str
    trace_id: str
    engine: str
    instance: str
    opened_ns: int
    last_ns: int  # latest violation
    closed_ns: int | None
    acknowledged: bool
    violations: int  # events received; the counters may be ahead of them
    reasons: dict[Reason, int]
    phases: dict[Phase, int]
    groups: tuple[str, ...]
    ranks: tuple[int, ...]
    sweeps: tuple[str, ...]  # ids of the sweeps that detected some of them
    other_names: tuple[str, ...] = ()  # in logs of its ranks; each finds it (absent in older bundles)
    acknowledged_ranks: tuple[int, ...] = ()  # all of them: the incident is acknowledged
    acknowledgements: tuple[Acknowledgement, ...] = ()  # oldest first


class Incident(IncidentSummary, frozen=True, kw_only=True):
    """An incident with its violations (first and latest) and the evidence the ranks sent."""

    first: tuple[ViolationEvent, ...]
    latest: tuple[ViolationEvent, ...]  # those after `first`
    evidence: tuple[Evidence, ...]
    heals: tuple[Heal, ...] = ()  # what was done about it, oldest first (absent in older bundles)


def trace_id_of(kind: str, name: str) -> str:
    """32 hex digits derived from the name, so that a span can be linked before it is created."""
    return hashlib.sha256(f"canary_obs {kind} {name}".encode()).hexdigest()[:32]


@dataclass(slots=True, kw_only=True)
class IncidentEntry:
    """An incident's mutable state. `last_event` is the hub's clock."""

    id: str
    engine: str
    instance: str
    opened_ns: int
    last_ns: int
    last_event: float
    closed_ns: int | None = None
    violations: int = 0
    newest_number: int = 0  # of its latest violation
    reasons: Counter[Reason] = field(default_factory=Counter)
    phases: Counter[Phase] = field(default_factory=Counter)
    groups: set[str] = field(default_factory=set)
    first_of: dict[int, ViolationEvent] = field(default_factory=dict)  # by rank
    sweeps: dict[str, None] = field(default_factory=dict)
    other_names: list[str] = field(default_factory=list)
    acknowledged_ranks: set[int] = field(default_factory=set)
    acknowledgements: deque[Acknowledgement] = field(
        default_factory=lambda: deque(maxlen=ACKNOWLEDGEMENTS_KEPT)
    )
    first: list[ViolationEvent] = field(default_factory=list)
    latest: deque[ViolationEvent] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    requested: set[tuple[int, str, int]] = field(default_factory=set)
    received: set[tuple[int, str, int]] = field(default_factory=set)
    requests_by_labels: Counter[tuple[int, str, Phase, Reason]] = field(default_factory=Counter)
    evidence: list[Evidence] = field(default_factory=list)
    heals: list[Heal] = field(default_factory=list)

    def add_event(self, event: ViolationEvent) -> CollectEvidence | None:
        """Count an event; returns a request for evidence to its rank, if more is wanted."""
        row, rank = event.violation, event.identity.rank
        self.violations += 1
        self.newest_number = event.number
        self.reasons[row.reason] += 1
        self.phases[row.phase] += 1
        self.groups.add(row.group)
        self.first_of.setdefault(rank, event)
        self.acknowledged_ranks.discard(rank)
        if row.sweep_id is not None and len(self.sweeps) < SWEEPS_KEPT:
            self.sweeps[row.sweep_id] = None
        if len(self.first) < EVENTS_KEPT:
            self.first.append(event)
        else:
            self.latest.append(event)
        slot, labels = (rank, row.group, row.slot), (rank, row.group, row.phase, row.reason)
        wanted = slot not in self.requested and self.requests_by_labels[labels] < EVIDENCE_PER_LABEL_SET
        if not wanted or row.slot < 0 or len(self.requested) == EVIDENCE_KEPT:
            return None
        self.requested.add(slot)
        self.requests_by_labels[labels] += 1
        return CollectEvidence(incident=self.id, group=row.group, slot=row.slot)

    @property
    def ranks(self) -> set[int]:
        """Those with violations."""
        return set(self.first_of)

    @property
    def acknowledged(self) -> bool:
        """Whether an operator has seen the violations of each of its ranks."""
        return bool(self.ranks) and self.ranks <= self.acknowledged_ranks

    def acknowledge(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """These ranks' violations were seen; returns the ranks whose were not before."""
        new = sorted(self.ranks.intersection(ranks) - self.acknowledged_ranks)
        self.acknowledged_ranks.update(new)
        return tuple(new)

    def summary(self) -> IncidentSummary:
        """An immutable copy without events and evidence."""
        return IncidentSummary(
            id=self.id,
            trace_id=trace_id_of("incident", self.id),
            engine=self.engine,
            instance=self.instance,
            opened_ns=self.opened_ns,
            last_ns=self.last_ns,
            closed_ns=self.closed_ns,
            acknowledged=self.acknowledged,
            violations=self.violations,
            reasons=dict(self.reasons),
            phases=dict(self.phases),
            groups=tuple(sorted(self.groups)),
            ranks=tuple(sorted(self.ranks)),
            sweeps=tuple(self.sweeps),
            other_names=tuple(self.other_names),
            acknowledged_ranks=tuple(sorted(self.acknowledged_ranks)),
            acknowledgements=tuple(self.acknowledgements),
        )

    def details(self) -> Incident:
        """An immutable copy with events and evidence."""
        return Incident(
            **msgspec.structs.asdict(self.summary()),
            first=tuple(self.first),
            latest=tuple(self.latest),
            evidence=tuple(self.evidence),
            heals=tuple(self.heals),
        )
