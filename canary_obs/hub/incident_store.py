"""Incidents: bursts of violations of one engine instance, each with an id that travels everywhere."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.records import CollectEvidence, Evidence, Identity
from canary_obs.vocabulary import Phase, Reason

EVENTS_KEPT = 16  # the first ones and the latest ones of an incident, each
EVIDENCE_KEPT = 16
EVIDENCE_PER_KIND = 2  # slots asked about for each (rank, group, phase, reason)
EXEMPLARS_KEPT = 4096
SWEEPS_KEPT = 16

# engine, instance, rank, group, phase, reason: the label values of kv_canary_violations_total.
ViolationLabels = tuple[str, ...]


class IncidentSummary(msgspec.Struct, frozen=True, kw_only=True):
    """An incident in numbers. It closes when it was quiet for a while, or when an operator has seen it."""

    id: str
    trace_id: str
    engine: str
    instance: str
    opened_ns: int
    last_ns: int  # latest violation
    closed_ns: int | None
    acknowledged: bool
    violations: int  # rows received; the counters may be ahead of them
    reasons: dict[Reason, int]
    phases: dict[Phase, int]
    groups: tuple[str, ...]
    ranks: tuple[int, ...]
    sweeps: tuple[str, ...]  # ids of the sweeps that found some of them


class Incident(IncidentSummary, frozen=True, kw_only=True):
    """An incident with its violations (first and latest) and the evidence the ranks sent."""

    first: tuple[ViolationEvent, ...]
    latest: tuple[ViolationEvent, ...]  # those after `first`
    evidence: tuple[Evidence, ...]


class Exemplar(msgspec.Struct, frozen=True, kw_only=True):
    """The latest violation of a labels, for the violation counter."""

    incident: str
    trace_id: str
    time_ns: int


def trace_id_of(kind: str, name: str) -> str:
    """32 hex digits, the same for the same name: a span can be linked before it is made."""
    return hashlib.sha256(f"canary_obs {kind} {name}".encode()).hexdigest()[:32]


@dataclass(slots=True, kw_only=True)
class _OpenIncident:
    """An incident while it may still change. `moved` in seconds of the hub's clock."""

    id: str
    engine: str
    instance: str
    opened_ns: int
    last_ns: int
    moved: float
    closed_ns: int | None = None
    acknowledged: bool = False
    violations: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)
    phases: Counter[Phase] = field(default_factory=Counter)
    groups: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    sweeps: dict[str, None] = field(default_factory=dict)
    first: list[ViolationEvent] = field(default_factory=list)
    latest: deque[ViolationEvent] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    asked: set[tuple[int, str, int]] = field(default_factory=set)
    answered: set[tuple[int, str, int]] = field(default_factory=set)
    asked_kinds: Counter[tuple[int, str, Phase, Reason]] = field(default_factory=Counter)
    evidence: list[Evidence] = field(default_factory=list)

    def add_event(self, event: ViolationEvent) -> CollectEvidence | None:
        """Count an event; returns what to ask of its rank, if anything."""
        row, rank = event.violation, event.identity.rank
        self.violations += 1
        self.reasons[row.reason] += 1
        self.phases[row.phase] += 1
        self.groups.add(row.group)
        self.ranks.add(rank)
        if row.sweep_id is not None and len(self.sweeps) < SWEEPS_KEPT:
            self.sweeps[row.sweep_id] = None
        if len(self.first) < EVENTS_KEPT:
            self.first.append(event)
        else:
            self.latest.append(event)
        place, kind = (rank, row.group, row.slot), (rank, row.group, row.phase, row.reason)
        wanted = place not in self.asked and self.asked_kinds[kind] < EVIDENCE_PER_KIND
        if not wanted or row.slot < 0 or len(self.asked) == EVIDENCE_KEPT:
            return None
        self.asked.add(place)
        self.asked_kinds[kind] += 1
        return CollectEvidence(incident=self.id, group=row.group, slot=row.slot)


class IncidentStore:
    """Recent incidents. Thread-safe."""

    def __init__(self, kept: int, quiet_seconds: float, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._kept, self._quiet, self._wall_ns = kept, quiet_seconds, wall_ns
        self._lock = threading.Lock()
        self._cases: OrderedDict[str, _OpenIncident] = OrderedDict()
        self._open: dict[tuple[str, str], _OpenIncident] = {}
        self._exemplars: OrderedDict[ViolationLabels, Exemplar] = OrderedDict()
        self.opened = 0

    def open_for(self, identity: Identity, now: float) -> str:
        """The id of the instance's running incident; a new one when there is none."""
        key = identity.engine, identity.instance
        with self._lock:
            case = self._open.get(key)
            if case is None:
                wall = self._wall_ns()
                stamp = datetime.fromtimestamp(wall / 1e9, UTC).strftime("%Y%m%dT%H%M%SZ")
                case = _OpenIncident(
                    id=f"{stamp}-{secrets.token_hex(3)}", engine=key[0], instance=key[1],
                    opened_ns=wall, last_ns=wall, moved=now,
                )  # fmt: skip
                self._open[key] = self._cases[case.id] = case
                self.opened += 1
                self._evict()
            return case.id

    def record(self, events: tuple[ViolationEvent, ...], now: float) -> list[CollectEvidence]:
        """Enter one rank's events, all of the same incident; returns what to ask of that rank."""
        asked: list[CollectEvidence] = []
        with self._lock:
            for event in events:
                case = self._cases.get(event.incident)
                if case is None:
                    continue
                case.moved, case.last_ns = now, self._wall_ns()
                if (command := case.add_event(event)) is not None:
                    asked.append(command)
                self._set_exemplar(case, event)
        return asked

    def add(self, evidence: Evidence) -> None:
        """Keep what a rank sent for an incident that is still kept; what was not asked for is ignored."""
        place = evidence.identity.rank, evidence.group, evidence.slot.slot
        with self._lock:
            case = self._cases.get(evidence.incident)
            if case is not None and place in case.asked and place not in case.answered:
                case.answered.add(place)
                case.evidence.append(evidence)

    def tick(self, now: float) -> None:
        """Close the incidents that have been quiet for long enough."""
        with self._lock:
            for key, case in list(self._open.items()):
                if now - case.moved > self._quiet:
                    self._close(key, case)

    def acknowledge(self) -> None:
        """An operator has seen everything up to now."""
        with self._lock:
            for key, case in list(self._open.items()):
                self._close(key, case)
            for case in self._cases.values():
                case.acknowledged = True

    def find(self, incident_id: str) -> Incident | None:
        """One incident, if it is still kept."""
        with self._lock:
            case = self._cases.get(incident_id)
            return None if case is None else _describe(case)

    def newest_first(self) -> list[IncidentSummary]:
        """Every incident kept, without events and evidence."""
        with self._lock:
            return [_summary(case) for case in reversed(self._cases.values())]

    def exemplars(self) -> dict[ViolationLabels, Exemplar]:
        """The latest violation of every labels that had one."""
        with self._lock:
            return dict(self._exemplars)

    def _set_exemplar(self, case: _OpenIncident, event: ViolationEvent) -> None:
        who, row = event.identity, event.violation
        labels = (who.engine, who.instance, str(who.rank), row.group, row.phase.value, row.reason.value)
        trace_id = trace_id_of("incident", case.id)
        self._exemplars[labels] = Exemplar(incident=case.id, trace_id=trace_id, time_ns=row.time_ns)
        self._exemplars.move_to_end(labels)
        if len(self._exemplars) > EXEMPLARS_KEPT:
            self._exemplars.popitem(last=False)

    def _close(self, key: tuple[str, str], case: _OpenIncident) -> None:
        case.closed_ns = self._wall_ns()
        del self._open[key]

    def _evict(self) -> None:
        while len(self._cases) > self._kept:
            _, gone = self._cases.popitem(last=False)
            if self._open.get((gone.engine, gone.instance)) is gone:
                del self._open[gone.engine, gone.instance]


def _summary_fields(case: _OpenIncident) -> dict[str, object]:
    return {
        "id": case.id,
        "trace_id": trace_id_of("incident", case.id),
        "engine": case.engine,
        "instance": case.instance,
        "opened_ns": case.opened_ns,
        "last_ns": case.last_ns,
        "closed_ns": case.closed_ns,
        "acknowledged": case.acknowledged,
        "violations": case.violations,
        "reasons": dict(case.reasons),
        "phases": dict(case.phases),
        "groups": tuple(sorted(case.groups)),
        "ranks": tuple(sorted(case.ranks)),
        "sweeps": tuple(case.sweeps),
    }


def _summary(case: _OpenIncident) -> IncidentSummary:
    return IncidentSummary(**_summary_fields(case))  # type: ignore[arg-type]


def _describe(case: _OpenIncident) -> Incident:
    return Incident(
        **_summary_fields(case),  # type: ignore[arg-type]
        first=tuple(case.first),
        latest=tuple(case.latest),
        evidence=tuple(case.evidence),
    )
