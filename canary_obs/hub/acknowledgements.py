"""Acknowledgements: what an operator has seen leaves the verdict, and comes back when that is undone."""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from canary_obs.errors import CanaryError
from canary_obs.hub.incident_store import IncidentStore
from canary_obs.hub.incidents import Acknowledgement
from canary_obs.hub.problems import Problems
from canary_obs.hub.rank_selection import EVERY_RANK, RankSelection
from canary_obs.hub.rank_table import RankTable
from canary_obs.hub.violation_store import ViolationStore

RECORDS_KEPT = 256


class UnknownIncident(CanaryError):
    """No incident with this id, or other name, is kept."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no incident {name!r} is kept; GET /canary/incidents lists them")


class AcknowledgeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen: everything, or one incident; of all ranks or some; with `up_to` no later violations."""

    incident: str | None = None
    selection: RankSelection = EVERY_RANK
    up_to: int | None = None  # number of the newest violation that was seen
    by: str | None = None
    comment: str | None = None


class AcknowledgementRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An acknowledgement that was carried out."""

    id: str
    time_ns: int
    by: str | None
    comment: str | None
    ranks: int  # live ones, to which it was sent
    incidents: dict[str, tuple[int, ...]]  # by id: the ranks whose violations were not acknowledged before
    undone_ns: int | None = None


class Acknowledgements:
    """The latest RECORDS_KEPT acknowledgements. Thread-safe: it shares the hub's lock."""

    def __init__(
        self,
        lock: threading.RLock,
        ranks: RankTable,
        incidents: IncidentStore,
        violations: ViolationStore,
        problems: Problems,
        wall_ns: Callable[[], int],
    ) -> None:
        self._lock, self._ranks, self._incidents = lock, ranks, incidents
        self._violations, self._problems, self._wall_ns = violations, problems, wall_ns
        self._records: OrderedDict[str, AcknowledgementRecord] = OrderedDict()

    def add(self, request: AcknowledgeRequest, now: float) -> AcknowledgementRecord:
        """Carry out a request. Raises UnknownIncident or UnknownRank.

        What an engine has found and not reported yet stays; so do faults, when an incident is named.
        """
        seen = Acknowledgement(
            id=uuid.uuid4().hex, time_ns=self._wall_ns(), by=request.by, comment=request.comment, ranks=()
        )
        with self._lock:
            if request.incident is not None:
                ranks, incidents = self._acknowledge_incident(request.incident, request, seen)
            else:
                ranks, incidents = self._acknowledge_ranks(request, seen, now)
            record = AcknowledgementRecord(
                id=seen.id, time_ns=seen.time_ns, by=seen.by, comment=seen.comment, ranks=ranks,
                incidents=incidents,
            )  # fmt: skip
            self._records[record.id] = record
            if len(self._records) > RECORDS_KEPT:
                self._records.popitem(last=False)
            return record

    def undo(self, acknowledgement_id: str) -> AcknowledgementRecord | None:
        """Take one back: its incidents are open questions again. None = it is not kept; undone once only.

        Faults that it covered, and violations of processes that have ended since, stay acknowledged.
        """
        with self._lock:
            record = self._records.get(acknowledgement_id)
            if record is None or record.undone_ns is not None:
                return record
            record = msgspec.structs.replace(record, undone_ns=self._wall_ns())
            self._records[record.id] = record
            for incident_id, numbers in record.incidents.items():
                if self._incidents.undo(incident_id, record.id, numbers, record.undone_ns or 0):
                    self._undo_on_ranks(incident_id, numbers)
            return record

    def newest_first(self) -> list[AcknowledgementRecord]:
        """Every kept acknowledgement."""
        with self._lock:
            return list(reversed(self._records.values()))

    def _acknowledge_incident(
        self, name: str, request: AcknowledgeRequest, seen: Acknowledgement
    ) -> tuple[int, dict[str, tuple[int, ...]]]:
        found = self._incidents.acknowledge_one(name, seen, request.selection, request.up_to)
        if found is None:
            raise UnknownIncident(name)
        incident, numbers = found
        reached = 0
        for number in numbers:
            rank = self._ranks.find((incident.engine, incident.instance, number))
            if rank is None:
                continue
            command = rank.acknowledge_incident(incident.id)
            if not rank.departed:
                rank.reply(command)
                reached += 1
            elif not rank.rows.unseen:
                rank.acknowledged = True
        new = next((made.ranks for made in incident.acknowledgements if made.id == seen.id), ())
        return reached, {incident.id: new} if new else {}

    def _acknowledge_ranks(
        self, request: AcknowledgeRequest, seen: Acknowledgement, now: float
    ) -> tuple[int, dict[str, tuple[int, ...]]]:
        up_to, selection = request.up_to, request.selection
        selected = set(selection.of(rank.identity.key for rank in self._ranks))
        incidents = self._incidents.acknowledge(seen, selection, up_to)
        if selection == EVERY_RANK:
            self._problems.acknowledge()
        reached = 0
        for rank in self._ranks:
            if rank.identity.key not in selected:
                continue
            later = None if up_to is None else self._violations.counts_after(up_to, rank.identity)
            command = rank.acknowledge(later)
            if not self._ranks.is_silent(rank, now):
                rank.reply(command)
            elif not later:
                rank.depart(now, acknowledged=True)
            reached += not rank.departed
        return reached, incidents

    def _undo_on_ranks(self, incident_id: str, numbers: tuple[int, ...]) -> None:
        incident = self._incidents.find(incident_id)
        if incident is None:
            return
        for number in numbers:
            rank = self._ranks.find((incident.engine, incident.instance, number))
            if rank is not None and rank.rows.seen[incident_id]:
                rank.reply(rank.undo(incident_id))
