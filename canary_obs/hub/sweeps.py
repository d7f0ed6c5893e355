"""Sweeps on the ranks: one record per sweep id, over all ranks that take part."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from canary_obs.errors import CanaryError
from canary_obs.records import Identity, RankKey, StartSweep, SweepProgress
from canary_obs.vocabulary import SweepStatus, Trigger

RECORDS_KEPT = 256
SweepVersion = tuple[int | None, int]  # see SweepRecord.version
# The first of these that any rank has is the sweep's status: a failure must not hide a violation.
_PRECEDENCE = (
    SweepStatus.RUNNING,
    SweepStatus.VIOLATED,
    SweepStatus.FAILED,
    SweepStatus.CANCELLED,
    SweepStatus.PASSED,
)


class SweepInProgress(CanaryError):
    """An operator's sweep is running; `running_id` is its id."""

    def __init__(self, running_id: str) -> None:
        self.running_id = running_id
        super().__init__(f"sweep {running_id} is running; wait for its end or cancel it first")


class RankSweep(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's sweep; `progress` is None until the rank reports."""

    key: RankKey
    status: SweepStatus
    progress: SweepProgress | None
    error: str | None


class SweepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep and its progress on each rank."""

    id: str
    trigger: Trigger
    status: SweepStatus
    groups: tuple[str, ...]  # empty = all
    data: bool
    unlocked_only: bool | None  # None = started by the engine, not reported
    swa_resident_only: bool | None
    requested_ns: int
    ended_ns: int | None
    ranks: tuple[RankSweep, ...]
    traceparent: str | None = None  # W3C: the span that asked for it

    @property
    def version(self) -> SweepVersion:
        """Another one once the sweep has ended, and each time that a rank joins it."""
        return self.ended_ns, len(self.ranks)


@dataclass(slots=True, kw_only=True)
class _RankEntry:
    """One rank's mutable state in a sweep. `progressed_at` is the hub's clock."""

    started_ns: int
    progressed_at: float
    status: SweepStatus = SweepStatus.RUNNING
    progress: SweepProgress | None = None
    error: str | None = None

    def reported_end(self) -> int | None:
        """The end by the rank's own report; None without one."""
        if self.progress is None or self.progress.status is SweepStatus.RUNNING:
            return None
        return self.progress.started_ns + round(self.progress.seconds * 1e9)


@dataclass(slots=True, kw_only=True)
class _SweepEntry:
    """A sweep, its ranks, and the futures that resolve at its end."""

    command: StartSweep
    trigger: Trigger
    unlocked_only: bool | None
    swa_resident_only: bool | None
    requested_ns: int
    ordered: bool = False  # started by this service, and not only reported by an engine
    traceparent: str | None = None
    ended_ns: int | None = None
    ranks: dict[RankKey, _RankEntry] = field(default_factory=dict)
    waiters: list[Future[SweepRecord]] = field(default_factory=list)

    @property
    def status(self) -> SweepStatus:
        """The sweep's status over all ranks."""
        return min((rank.status for rank in self.ranks.values()), key=_PRECEDENCE.index)

    def reported_end(self) -> int | None:
        """The end that the ranks report of a sweep that this service did not start; None if one reports none.

        It may be long ago, as every snapshot repeats the rank's last sweep.
        """
        ends = [rank.reported_end() for rank in self.ranks.values()]
        known = [end for end in ends if end is not None]
        return None if self.ordered or len(known) < len(ends) else max(known)

    def record(self) -> SweepRecord:
        """An immutable copy."""
        return SweepRecord(
            id=self.command.id,
            trigger=self.trigger,
            status=self.status,
            groups=self.command.groups,
            data=self.command.data,
            unlocked_only=self.unlocked_only,
            swa_resident_only=self.swa_resident_only,
            requested_ns=self.requested_ns,
            ended_ns=self.ended_ns,
            traceparent=self.traceparent,
            ranks=tuple(
                RankSweep(key=key, status=rank.status, progress=rank.progress, error=rank.error)
                for key, rank in self.ranks.items()
            ),
        )

    def resolve_waiters(self) -> None:
        """Resolve the futures with the record."""
        waiters, self.waiters = self.waiters, []
        record = self.record()
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(record)


class SweepStore:
    """Recent sweeps by id. Not thread-safe: the hub holds its lock around every call."""

    def __init__(self, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._wall_ns = wall_ns
        self._entries: OrderedDict[str, _SweepEntry] = OrderedDict()

    @property
    def running_id(self) -> str | None:
        """The id of the operator's sweep that is running."""
        for entry in reversed(self._entries.values()):
            if entry.ordered and entry.status is SweepStatus.RUNNING:
                return entry.command.id
        return None

    def start(
        self, command: StartSweep, targets: Iterable[Identity], now: float, traceparent: str | None = None
    ) -> SweepRecord:
        """Record the start of an operator's sweep. Raises SweepInProgress while another one runs."""
        if (running := self.running_id) is not None:
            raise SweepInProgress(running)
        entry = _SweepEntry(
            command=command,
            trigger=Trigger.DEMAND,
            unlocked_only=command.unlocked_only,
            swa_resident_only=command.swa_resident_only,
            requested_ns=self._wall_ns(),
            ordered=True,
            traceparent=traceparent,
        )
        for identity in targets:
            entry.ranks[identity.key] = _RankEntry(started_ns=identity.started_ns, progressed_at=now)
        self._store(entry)
        return entry.record()

    def record_progress(self, identity: Identity, progress: SweepProgress, now: float) -> None:
        """Record one rank's progress; a sweep that the service did not start is recorded, too."""
        entry = self._entries.get(progress.id)
        if entry is None:
            entry = _reported_entry(progress)
        rank = entry.ranks.get(identity.key)
        if rank is None:
            rank = entry.ranks[identity.key] = _RankEntry(started_ns=identity.started_ns, progressed_at=now)
            entry.ended_ns = None
        self._store(entry)
        if rank.status is not SweepStatus.RUNNING or rank.started_ns != identity.started_ns:
            return
        if rank.progress is None or rank.progress.checked != progress.checked:
            rank.progressed_at = now
        rank.progress, rank.status, rank.error = progress, progress.status, progress.error
        self._finish_if_done(entry)

    def fail_rank(self, key: RankKey, error: str, *, unless_started_ns: int | None = None) -> None:
        """End the running sweeps of a rank as FAILED, except those of the process with this started_ns."""
        for entry in self._entries.values():
            rank = entry.ranks.get(key)
            if rank is None or rank.status is not SweepStatus.RUNNING:
                continue
            if rank.started_ns != unless_started_ns:
                rank.status, rank.error = SweepStatus.FAILED, error
                self._finish_if_done(entry)

    def time_out(self, now: float, timeout: float) -> list[tuple[str, RankKey]]:
        """Fail the ranks without progress for `timeout` seconds; returns (sweep id, rank) of each."""
        timed_out = []
        for sweep_id, entry in self._entries.items():
            for key, rank in entry.ranks.items():
                if rank.status is SweepStatus.RUNNING and now - rank.progressed_at > timeout:
                    rank.status = SweepStatus.FAILED
                    rank.error = f"no progress for {timeout:g} s"
                    timed_out.append((sweep_id, key))
            self._finish_if_done(entry)
        return timed_out

    def find(self, sweep_id: str) -> SweepRecord | None:
        """One sweep by id."""
        entry = self._entries.get(sweep_id)
        return None if entry is None else entry.record()

    def newest_first(self, known: Mapping[str, SweepVersion]) -> list[SweepRecord]:
        """Sweeps, except those whose version in `known` (by id) is still the same."""
        return [
            entry.record()
            for sweep_id, entry in reversed(self._entries.items())
            if sweep_id not in known or known[sweep_id] != (entry.ended_ns, len(entry.ranks))
        ]

    def ranks_running(self, sweep_id: str) -> list[RankKey]:
        """The ranks on which a sweep has not ended."""
        entry = self._entries.get(sweep_id)
        ranks = entry.ranks.items() if entry else ()
        return [key for key, rank in ranks if rank.status is SweepStatus.RUNNING]

    def future(self, sweep_id: str) -> Future[SweepRecord]:
        """A future that resolves with the record at the sweep's end. Raises KeyError for an unknown id."""
        entry, waiter = self._entries[sweep_id], Future[SweepRecord]()
        entry.waiters.append(waiter)
        if entry.ended_ns is not None:
            entry.resolve_waiters()
        return waiter

    def _store(self, entry: _SweepEntry) -> None:
        self._entries.setdefault(entry.command.id, entry)
        while len(self._entries) > RECORDS_KEPT:
            ended = (sweep_id for sweep_id, kept in self._entries.items() if kept.ended_ns is not None)
            # If none has ended, the oldest is evicted: memory stays bounded whatever engines report.
            self._entries.pop(next(ended, next(iter(self._entries))))

    def _finish_if_done(self, entry: _SweepEntry) -> None:
        if entry.ended_ns is None and entry.status is not SweepStatus.RUNNING:
            entry.ended_ns = entry.reported_end() or self._wall_ns()
            entry.resolve_waiters()


def _reported_entry(progress: SweepProgress) -> _SweepEntry:
    command = StartSweep(id=progress.id, groups=progress.groups, data=progress.data)
    return _SweepEntry(
        command=command,
        trigger=progress.trigger,
        unlocked_only=None,
        swa_resident_only=None,
        requested_ns=progress.started_ns,
    )
