"""The fleet at one moment, as the overview shows it: small enough to be fetched every other second."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from canary_obs import __version__
from canary_obs.hub.hub import Hub
from canary_obs.hub.incidents import IncidentSummary
from canary_obs.hub.ranks import RankView, violations_of
from canary_obs.hub.sweep_records import SweepRecord, SweepVersion
from canary_obs.records import GroupInfo, RankKey, Snapshot, SweepProgress
from canary_obs.vocabulary import Mode, Reason, State, SweepStatus, Trigger

INCIDENTS_SHOWN = 24
_SEVERITY = {state: severity for severity, state in enumerate(State)}


class GroupCell(msgspec.Struct, frozen=True, kw_only=True):
    """One group of one rank. None = unknown."""

    name: str
    coverage: float | None  # share of its KV bytes that fingerprints cover
    checked: float | None  # share of its forwards that were checked
    age_seconds: float | None  # since a sweep last went through it
    slots: int | None
    verified: int  # slots, since attach
    violations: int


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. Counters are summed over restarts; rates are their differences over `time_ns`."""

    key: RankKey
    state: State
    reasons: tuple[str, ...]
    device: str
    mode: Mode | None
    paused: bool
    departed: bool
    restarts: int
    snapshot_age: float | None
    time_ns: int | None  # of the snapshot, by the rank's clock
    step: int
    verified: int
    hashed_bytes: int
    violations: int
    overhead: float | None  # share of the engine's time
    oldest_check_seconds: float | None  # by the patrol; None = patrol off
    injected: int  # faults injected on purpose
    groups: tuple[GroupCell, ...]


class SweepRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep over its ranks. `rate` in slots per second; `eta_seconds` None = not known yet, or ended."""

    id: str
    trigger: Trigger
    status: SweepStatus
    paused: bool
    requested_ns: int
    ended_ns: int | None
    ranks: int
    ranks_ended: int
    total: int
    checked: int
    violations: int
    rate: float | None
    eta_seconds: float | None
    errors: tuple[str, ...]


class IncidentRow(msgspec.Struct, frozen=True, kw_only=True):
    """An incident on one line."""

    id: str
    engine: str
    instance: str
    ranks: tuple[int, ...]
    opened_ns: int
    last_ns: int
    closed_ns: int | None
    acknowledged: bool
    violations: int
    reasons: dict[Reason, int]
    sentence: str


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """What the overview shows. `ranks` are sorted worst first, `incidents` unacknowledged first."""

    version: str
    time_ns: int
    state: State
    reasons: tuple[str, ...]
    ranks: tuple[RankRow, ...]
    sweep: SweepRow | None  # the operator's latest
    incidents: tuple[IncidentRow, ...]


class SweepFollower:
    """Finds the latest sweep that an operator started, without copying all of them each time."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._known: dict[str, SweepVersion] = {}
        self._latest: str | None = None

    def latest(self) -> SweepRecord | None:
        """The operator's latest sweep as it is now; None = there was none."""
        for record in reversed(self._hub.sweeps(self._known)):
            if record.id not in self._known and record.trigger is Trigger.DEMAND:
                self._latest = record.id
            self._known[record.id] = record.version
        while len(self._known) > 512:
            del self._known[next(iter(self._known))]
        return None if self._latest is None else self._hub.sweep(self._latest)


def fleet_view(hub: Hub, sweep: SweepRecord | None, incidents: Iterable[IncidentRow]) -> FleetView:
    """The fleet now."""
    now_ns = time.time_ns()
    state, reasons = hub.verdict()
    rows = [_rank_row(rank, now_ns) for rank in hub.ranks()]
    rows.sort(key=lambda row: (-_SEVERITY[row.state], -row.violations, row.key))
    return FleetView(
        version=__version__,
        time_ns=now_ns,
        state=state,
        reasons=reasons,
        ranks=tuple(rows),
        sweep=None if sweep is None else sweep_row(sweep),
        incidents=tuple(incidents),
    )


def shown_incidents(hub: Hub) -> list[IncidentSummary]:
    """The incidents of the overview: unacknowledged ones first, then the newest."""
    newest = hub.incidents.newest_first()
    newest.sort(key=lambda incident: incident.acknowledged)
    return newest[:INCIDENTS_SHOWN]


def sweep_row(record: SweepRecord) -> SweepRow:
    """A sweep's progress over all ranks."""
    known = [rank.progress for rank in record.ranks if rank.progress is not None]
    waiting = (SweepStatus.RUNNING, SweepStatus.SCHEDULED)
    return SweepRow(
        id=record.id,
        trigger=record.trigger,
        status=record.status,
        paused=record.paused,
        requested_ns=record.requested_ns,
        ended_ns=record.ended_ns,
        ranks=len(record.ranks),
        ranks_ended=sum(rank.status not in waiting for rank in record.ranks),
        total=record.total,
        checked=sum(_done(progress) for progress in known),
        violations=record.violations,
        rate=record.slots_per_second,
        eta_seconds=record.eta_seconds,
        errors=tuple(sorted({f"{'/'.join(map(str, r.key))}: {r.error}" for r in record.ranks if r.error})),
    )


def _done(progress: SweepProgress) -> int:
    return progress.checked + sum(progress.skipped.values())


def _rank_row(rank: RankView, now_ns: int) -> RankRow:
    snapshot, totals = rank.snapshot, rank.totals
    infos = {info.name: info for info in rank.hello.groups} if rank.hello else {}
    groups = tuple(_group_cell(rank, name, infos.get(name), now_ns) for name in _names(totals, infos))
    sizes = {name: info.protected_slot_bytes for name, info in infos.items()}
    counters = totals.groups.items() if totals else ()
    patrol = snapshot.patrol if snapshot else None
    return RankRow(
        key=rank.identity.key,
        state=rank.state,
        reasons=rank.reasons,
        device=rank.identity.device,
        mode=snapshot.mode if snapshot else None,
        paused=snapshot is not None and snapshot.paused,
        departed=rank.departed,
        restarts=rank.restarts,
        snapshot_age=rank.snapshot_age,
        time_ns=snapshot.time_ns if snapshot else None,
        step=totals.step if totals else 0,
        verified=sum(cell.verified for cell in groups),
        hashed_bytes=sum(sum(group.hashed.values()) * sizes.get(name, 0) for name, group in counters),
        violations=violations_of(totals) if totals else 0,
        overhead=_overhead(totals),
        oldest_check_seconds=patrol.oldest_check_seconds if patrol else None,
        injected=sum(count.injected for count in totals.perturbations.values()) if totals else 0,
        groups=groups,
    )


def _names(totals: Snapshot | None, infos: dict[str, GroupInfo]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*infos, *(totals.groups if totals else ()))))


def _overhead(totals: Snapshot | None) -> float | None:
    if totals is None or totals.step_seconds <= 0:
        return None
    return sum(totals.overhead_seconds.values()) / totals.step_seconds


def _group_cell(rank: RankView, name: str, info: GroupInfo | None, now_ns: int) -> GroupCell:
    totals = rank.totals
    counters = totals.groups.get(name) if totals else None
    forwards = (totals.forwards or {}).get(name) if totals else None
    checked = (totals.forwards_checked or {}).get(name) if totals else None
    return GroupCell(
        name=name,
        coverage=info.protected_slot_bytes / info.slot_bytes if info and info.slot_bytes else None,
        checked=min(1.0, checked / forwards) if forwards and checked is not None else None,
        age_seconds=_age(rank, name, now_ns),
        slots=info.slots if info else None,
        verified=sum(counters.verified.values()) if counters else 0,
        violations=sum(sum(found.values()) for found in counters.violations.values()) if counters else 0,
    )


def _age(rank: RankView, group: str, now_ns: int) -> float | None:
    """Seconds since the end of the latest sweep through a group, by the clock of its rank."""
    snapshot = rank.snapshot
    if snapshot is None:
        return None
    ends = []
    if snapshot.last_sweep_ns is not None:
        ends.append(snapshot.last_sweep_ns / 1e9)
    if (sweep := snapshot.sweep) is not None:  # it may have ended without passing, or have had other groups
        ends += [sweep.started_ns / 1e9 + share.ended for share in sweep.shares if share.group == group]
    if not ends:
        return None
    return max(0.0, now_ns / 1e9 + (rank.clock_skew_seconds or 0.0) - max(ends))
