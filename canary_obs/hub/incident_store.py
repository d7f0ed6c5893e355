"""Incidents: bursts of violations of one engine instance, each with an id that travels everywhere."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import msgspec

from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.incident_names import NAMES_KEPT, is_name, new_name
from canary_obs.records import CollectEvidence, Evidence, Identity, RankKey
from canary_obs.vocabulary import Phase, Reason

EVENTS_KEPT = 16  # per incident: as many of the first and of the latest
EVIDENCE_KEPT = 16
EVIDENCE_PER_LABEL_SET = 2  # slots requested per (rank, group, phase, reason)
EXEMPLARS_KEPT = 4096
SWEEPS_KEPT = 16
OTHER_NAMES_KEPT = 64

# engine, instance, rank, group, phase, reason: the label values of kv_canary_violations_total.
ViolationLabels = tuple[str, ...]


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


class Incident(IncidentSummary, frozen=True, kw_only=True):
    """An incident with its violations (first and latest) and the evidence the ranks sent."""

    first: tuple[ViolationEvent, ...]
    latest: tuple[ViolationEvent, ...]  # those after `first`
    evidence: tuple[Evidence, ...]


class Exemplar(msgspec.Struct, frozen=True, kw_only=True):
    """The latest violation of a label set, for the violation counter."""

    incident: str
    trace_id: str
    time_ns: int


def trace_id_of(kind: str, name: str) -> str:
    """32 hex digits derived from the name, so that a span can be linked before it is created."""
    return hashlib.sha256(f"canary_obs {kind} {name}".encode()).hexdigest()[:32]


@dataclass(slots=True, kw_only=True)
class _IncidentEntry:
    """An incident's mutable state. `last_event` is the hub's clock."""

    id: str
    engine: str
    instance: str
    opened_ns: int
    last_ns: int
    last_event: float
    closed_ns: int | None = None
    acknowledged: bool = False
    violations: int = 0
    newest_number: int = 0  # of its latest violation
    reasons: Counter[Reason] = field(default_factory=Counter)
    phases: Counter[Phase] = field(default_factory=Counter)
    groups: set[str] = field(default_factory=set)
    first_of: dict[int, ViolationEvent] = field(default_factory=dict)  # by rank
    sweeps: dict[str, None] = field(default_factory=dict)
    other_names: list[str] = field(default_factory=list)
    first: list[ViolationEvent] = field(default_factory=list)
    latest: deque[ViolationEvent] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    requested: set[tuple[int, str, int]] = field(default_factory=set)
    received: set[tuple[int, str, int]] = field(default_factory=set)
    requests_by_labels: Counter[tuple[int, str, Phase, Reason]] = field(default_factory=Counter)
    evidence: list[Evidence] = field(default_factory=list)

    def add_event(self, event: ViolationEvent) -> CollectEvidence | None:
        """Count an event; returns a request for evidence to its rank, if more is wanted."""
        row, rank = event.violation, event.identity.rank
        self.violations += 1
        self.newest_number = event.number
        self.reasons[row.reason] += 1
        self.phases[row.phase] += 1
        self.groups.add(row.group)
        self.first_of.setdefault(rank, event)
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
            ranks=tuple(sorted(self.first_of)),
            sweeps=tuple(self.sweeps),
            other_names=tuple(self.other_names),
        )

    def details(self) -> Incident:
        """An immutable copy with events and evidence."""
        return Incident(
            **msgspec.structs.asdict(self.summary()),
            first=tuple(self.first),
            latest=tuple(self.latest),
            evidence=tuple(self.evidence),
        )


class IncidentStore:
    """Recent incidents. Thread-safe."""

    def __init__(self, kept: int, quiet_seconds: float, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._kept, self._quiet, self._wall_ns = kept, quiet_seconds, wall_ns
        self._lock = threading.Lock()
        self._incidents: OrderedDict[str, _IncidentEntry] = OrderedDict()
        self._open: dict[tuple[str, str], _IncidentEntry] = {}
        self._by_other_name: dict[str, _IncidentEntry] = {}
        self._exemplars: OrderedDict[ViolationLabels, Exemplar] = OrderedDict()
        self.opened = 0

    def open_for(self, identity: Identity, now: float, names: tuple[str, ...] = ()) -> str:
        """The id of the instance's open incident, which is opened if there is none.

        names: those that the rank's log gives it, the newest at the end. A new incident has the newest that
        is not in use, so that it keeps its id when the service restarts.
        """
        key = identity.engine, identity.instance
        with self._lock:
            free = [
                name
                for name in dict.fromkeys(names[-NAMES_KEPT:])
                if is_name(name) and self._entry(name) is None
            ]
            incident = self._open.get(key)
            if incident is None:
                wall_ns = self._wall_ns()
                incident = _IncidentEntry(
                    id=free.pop() if free else self._next_id(key, names, wall_ns), engine=key[0],
                    instance=key[1], opened_ns=wall_ns, last_ns=wall_ns, last_event=now,
                )  # fmt: skip
                self._open[key] = self._incidents[incident.id] = incident
                self.opened += 1
                self._evict()
            for name in free[: OTHER_NAMES_KEPT - len(incident.other_names)]:
                incident.other_names.append(name)
                self._by_other_name[name] = incident
            return incident.id

    def _entry(self, name: str) -> _IncidentEntry | None:
        return self._incidents.get(name) or self._by_other_name.get(name)

    def _next_id(self, key: tuple[str, str], names: tuple[str, ...], wall_ns: int) -> str:
        # The rank goes on with the name of an incident that is closed here.
        before = self._entry(names[-1]) if names else None
        if before is None or (before.engine, before.instance) != key:
            return new_name(wall_ns)
        return next(new for number in count(2) if self._entry(new := f"{names[-1]}-{number}") is None)

    def add_events(self, events: tuple[ViolationEvent, ...], now: float) -> list[CollectEvidence]:
        """Add events of one rank; returns the requests for evidence to send to it."""
        requests: list[CollectEvidence] = []
        with self._lock:
            for event in events:
                incident = self._incidents.get(event.incident)
                if incident is None:
                    continue
                incident.last_event, incident.last_ns = now, self._wall_ns()
                if (request := incident.add_event(event)) is not None:
                    requests.append(request)
                self._set_exemplar(incident, event)
        return requests

    def seen_again(self, identity: Identity, now: float) -> None:
        """A rank has detected known findings once more: the instance's open incident stays open."""
        with self._lock:
            incident = self._open.get((identity.engine, identity.instance))
            if incident is not None:
                incident.last_event, incident.last_ns = now, self._wall_ns()

    def add_evidence(self, evidence: Evidence) -> None:
        """Add evidence to its incident. Evidence that was not requested, or received before, is ignored."""
        slot = evidence.identity.rank, evidence.group, evidence.slot.slot
        with self._lock:
            incident = self._incidents.get(evidence.incident)
            if incident is not None and slot in incident.requested and slot not in incident.received:
                incident.received.add(slot)
                incident.evidence.append(evidence)

    def tick(self, now: float) -> None:
        """Close the incidents without recent violations."""
        with self._lock:
            for key, incident in list(self._open.items()):
                if now - incident.last_event > self._quiet:
                    self._close(key, incident)

    def acknowledge(self, up_to: int | None = None) -> None:
        """Close incidents and mark them as acknowledged; with `up_to`, those without later violations."""
        with self._lock:
            for incident in self._incidents.values():
                if up_to is not None and incident.newest_number > up_to:
                    continue
                incident.acknowledged = True
                key = incident.engine, incident.instance
                if self._open.get(key) is incident:
                    self._close(key, incident)

    def find(self, incident_id: str) -> Incident | None:
        """One incident by its id, or by another name that a rank's log gives it; None = it is not stored."""
        with self._lock:
            incident = self._entry(incident_id)
            return None if incident is None else incident.details()

    def newest_first(self) -> list[IncidentSummary]:
        """Every stored incident, without events and evidence."""
        with self._lock:
            return [incident.summary() for incident in reversed(self._incidents.values())]

    def open_findings(self) -> tuple[ViolationEvent, ...]:
        """By rank the first violation of its latest incident that nobody has acknowledged."""
        found: dict[RankKey, ViolationEvent] = {}
        with self._lock:
            for incident in self._incidents.values():
                if not incident.acknowledged:
                    found |= {event.identity.key: event for event in incident.first_of.values()}
        return tuple(found.values())

    def exemplars(self) -> dict[ViolationLabels, Exemplar]:
        """The latest violation of every label set that had one."""
        with self._lock:
            return dict(self._exemplars)

    def _set_exemplar(self, incident: _IncidentEntry, event: ViolationEvent) -> None:
        rank, row = event.identity, event.violation
        labels = (rank.engine, rank.instance, str(rank.rank), row.group, row.phase.value, row.reason.value)
        trace_id = trace_id_of("incident", incident.id)
        self._exemplars[labels] = Exemplar(incident=incident.id, trace_id=trace_id, time_ns=row.time_ns)
        self._exemplars.move_to_end(labels)
        if len(self._exemplars) > EXEMPLARS_KEPT:
            self._exemplars.popitem(last=False)

    def _close(self, key: tuple[str, str], incident: _IncidentEntry) -> None:
        incident.closed_ns = self._wall_ns()
        del self._open[key]

    def _evict(self) -> None:
        while len(self._incidents) > self._kept:
            _, evicted = self._incidents.popitem(last=False)
            for name in evicted.other_names:
                del self._by_other_name[name]
            if self._open.get((evicted.engine, evicted.instance)) is evicted:
                del self._open[evicted.engine, evicted.instance]
