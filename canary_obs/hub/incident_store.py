"""Recent incidents of all engine instances."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import count

import msgspec

from canary_obs.heals import Heal
from canary_obs.hub.damage_account import DamageAccount
from canary_obs.hub.incidents import (
    ACKNOWLEDGEMENTS_KEPT,
    HEALS_KEPT,
    Acknowledgement,
    Incident,
    IncidentEntry,
    IncidentSummary,
    trace_id_of,
)
from canary_obs.hub.rank_selection import EVERY_RANK, RankSelection
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.incident_names import NAMES_KEPT, is_name, new_name
from canary_obs.records import CollectEvidence, Evidence, Identity, RankKey

EXEMPLARS_KEPT = 4096
OTHER_NAMES_KEPT = 64

# engine, instance, rank, group, phase, reason: the label values of kv_canary_violations_total.
ViolationLabels = tuple[str, ...]


class Exemplar(msgspec.Struct, frozen=True, kw_only=True):
    """The latest violation of a label set, for the violation counter."""

    incident: str
    trace_id: str
    time_ns: int


class IncidentStore:
    """Recent incidents. Thread-safe."""

    def __init__(self, kept: int, quiet_seconds: float, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._kept, self._quiet, self._wall_ns = kept, quiet_seconds, wall_ns
        self._lock = threading.Lock()
        self._incidents: OrderedDict[str, IncidentEntry] = OrderedDict()
        self._open: dict[tuple[str, str], IncidentEntry] = {}
        self._by_other_name: dict[str, IncidentEntry] = {}
        self._exemplars: OrderedDict[ViolationLabels, Exemplar] = OrderedDict()
        self._damage = DamageAccount()
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
                incident = IncidentEntry(
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

    def id_for(self, identity: Identity, name: str) -> str:
        """The id of the open incident of an instance, else of the one that a rank's log gives this name."""
        with self._lock:
            incident = self._open.get((identity.engine, identity.instance)) or self._entry(name)
            return name if incident is None else incident.id

    def _entry(self, name: str) -> IncidentEntry | None:
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
                self._damage.add_arrival(event)
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
                self._damage.add(evidence)

    def add_heal(self, incident: str, heal: Heal) -> None:
        """Add what healing did to the incident with this id; the oldest are kept."""
        with self._lock:
            entry = self._entry(incident)
            if entry is not None and len(entry.heals) < HEALS_KEPT:
                entry.heals.append(heal)

    def damage(self) -> tuple[dict[tuple[RankKey, int, str], int], dict[tuple[RankKey, str], int]]:
        """Flipped bits by rank, position and direction; slots that arrived damaged by rank and sender."""
        with self._lock:
            return dict(self._damage.bits), dict(self._damage.transferred)

    def tick(self, now: float) -> None:
        """Close the incidents without recent violations."""
        with self._lock:
            for key, incident in list(self._open.items()):
                if now - incident.last_event > self._quiet:
                    self._close(key, incident)

    def acknowledge(
        self, seen: Acknowledgement, selection: RankSelection = EVERY_RANK, up_to: int | None = None
    ) -> dict[str, tuple[int, ...]]:
        """Mark incidents of the selected ranks, with `up_to` those without later violations.

        Returns the ranks that were not acknowledged before, by incident; one with all of them is closed.
        """
        found: dict[str, tuple[int, ...]] = {}
        with self._lock:
            for incident in self._incidents.values():
                if up_to is not None and incident.newest_number > up_to:
                    continue
                key = incident.engine, incident.instance
                ranks = [rank for rank in incident.ranks if selection.matches((*key, rank))]
                if new := self._acknowledge(incident, ranks, seen):
                    found[incident.id] = new
        return found

    def acknowledge_one(
        self, name: str, seen: Acknowledgement, selection: RankSelection, up_to: int | None
    ) -> tuple[IncidentSummary, tuple[int, ...]] | None:
        """The same for one incident, and the ranks that it was marked for; None = it is not stored."""
        with self._lock:
            incident = self._entry(name)
            if incident is None:
                return None
            key = incident.engine, incident.instance
            ranks = tuple(rank for rank in sorted(incident.ranks) if selection.matches((*key, rank)))
            covered = ranks if up_to is None or incident.newest_number <= up_to else ()
            self._acknowledge(incident, covered, seen)
            return incident.summary(), covered

    def undo(self, incident_id: str, acknowledgement: str, ranks: Iterable[int], time_ns: int) -> bool:
        """Take an acknowledgement back for these ranks; False = the incident is not stored any more."""
        with self._lock:
            incident = self._incidents.get(incident_id)
            if incident is None:
                return False
            incident.acknowledged_ranks.difference_update(ranks)
            incident.acknowledgements = deque(
                (
                    msgspec.structs.replace(seen, undone_ns=time_ns) if seen.id == acknowledgement else seen
                    for seen in incident.acknowledgements
                ),
                maxlen=ACKNOWLEDGEMENTS_KEPT,
            )
            return True

    def _acknowledge(
        self, incident: IncidentEntry, ranks: Iterable[int], seen: Acknowledgement
    ) -> tuple[int, ...]:
        if new := incident.acknowledge(ranks):
            incident.acknowledgements.append(msgspec.structs.replace(seen, ranks=new))
        key = incident.engine, incident.instance
        if incident.acknowledged and self._open.get(key) is incident:
            self._close(key, incident)
        return new

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
        """By rank the first violation of its latest incident that nobody has acknowledged for this rank."""
        found: dict[RankKey, ViolationEvent] = {}
        with self._lock:
            for incident in self._incidents.values():
                found |= {
                    event.identity.key: event
                    for rank, event in incident.first_of.items()
                    if rank not in incident.acknowledged_ranks
                }
        return tuple(found.values())

    def exemplars(self) -> dict[ViolationLabels, Exemplar]:
        """The latest violation of every label set that had one."""
        with self._lock:
            return dict(self._exemplars)

    def _set_exemplar(self, incident: IncidentEntry, event: ViolationEvent) -> None:
        rank, row = event.identity, event.violation
        labels = (rank.engine, rank.instance, str(rank.rank), row.group, row.phase.value, row.reason.value)
        trace_id = trace_id_of("incident", incident.id)
        self._exemplars[labels] = Exemplar(incident=incident.id, trace_id=trace_id, time_ns=row.time_ns)
        self._exemplars.move_to_end(labels)
        if len(self._exemplars) > EXEMPLARS_KEPT:
            self._exemplars.popitem(last=False)

    def _close(self, key: tuple[str, str], incident: IncidentEntry) -> None:
        incident.closed_ns = self._wall_ns()
        del self._open[key]

    def _evict(self) -> None:
        while len(self._incidents) > self._kept:
            _, evicted = self._incidents.popitem(last=False)
            for name in evicted.other_names:
                del self._by_other_name[name]
            if self._open.get((evicted.engine, evicted.instance)) is evicted:
                del self._open[evicted.engine, evicted.instance]
