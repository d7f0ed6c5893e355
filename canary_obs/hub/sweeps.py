"""Sweeps as the service knows them: one record per id over all ranks it was sent to."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from canary_obs.errors import CanaryError
from canary_obs.records import Identity, StartSweep, SweepProgress
from canary_obs.vocabulary import SweepStatus, Trigger

RankKey = tuple[str, str, int]
RECORDS_KEPT = 256
# One rank's failure must not hide another's finding, nor a pass hide a failure.
_PRECEDENCE = (
    SweepStatus.RUNNING,
    SweepStatus.VIOLATED,
    SweepStatus.FAILED,
    SweepStatus.CANCELLED,
    SweepStatus.PASSED,
)


class SweepInProgress(CanaryError):
    """An operator's sweep is running; `running_id` names it."""

    def __init__(self, running_id: str) -> None:
        self.running_id = running_id
        super().__init__(f"sweep {running_id} is running; wait for its end, or cancel it first")


class RankSweep(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part in a sweep; `progress` is None until the rank reports."""

    key: RankKey
    status: SweepStatus
    progress: SweepProgress | None
    error: str | None


class SweepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep with what is known of it so far."""

    id: str
    trigger: Trigger
    status: SweepStatus
    groups: tuple[str, ...]  # empty = all
    data: bool
    unlocked_only: bool | None  # None = the engine started it and did not say
    swa_resident_only: bool | None
    requested_ns: int
    ended_ns: int | None
    ranks: tuple[RankSweep, ...]


@dataclass(slots=True, kw_only=True)
class _Share:
    """One rank's part while it may still change. `moved_at` in seconds of the hub's clock."""

    started_ns: int
    moved_at: float
    status: SweepStatus = SweepStatus.RUNNING
    progress: SweepProgress | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A sweep, its ranks, and who waits for its end."""

    command: StartSweep
    trigger: Trigger
    unlocked_only: bool | None
    swa_resident_only: bool | None
    requested_ns: int
    ended_ns: int | None = None
    shares: dict[RankKey, _Share] = field(default_factory=dict)
    waiters: list[Future[SweepRecord]] = field(default_factory=list)

    @property
    def status(self) -> SweepStatus:
        """The sweep's status over all its ranks."""
        return min((share.status for share in self.shares.values()), key=_PRECEDENCE.index)


class SweepStore:
    """Recent sweeps by id. Not thread-safe: the hub holds its lock around every call."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    @property
    def running_demand(self) -> str | None:
        """The id of the operator's sweep under way."""
        for entry in reversed(self._entries.values()):
            if entry.trigger is Trigger.DEMAND and entry.status is SweepStatus.RUNNING:
                return entry.command.id
        return None

    def begin(self, command: StartSweep, targets: Iterable[Identity], now: float) -> SweepRecord:
        """Open an operator's sweep. Raises SweepInProgress while another one runs."""
        if (running := self.running_demand) is not None:
            raise SweepInProgress(running)
        entry = _Entry(
            command=command,
            trigger=Trigger.DEMAND,
            unlocked_only=command.unlocked_only,
            swa_resident_only=command.swa_resident_only,
            requested_ns=time.time_ns(),
        )
        for identity in targets:
            entry.shares[identity.key] = _Share(started_ns=identity.started_ns, moved_at=now)
        self._keep(entry)
        return _describe(entry)

    def record_progress(self, identity: Identity, progress: SweepProgress, now: float) -> None:
        """Take in one rank's report; sweeps the service did not start are recorded too."""
        entry = self._entries.get(progress.id)
        if entry is None:
            entry = _entry_of(progress)
        share = entry.shares.get(identity.key)
        if share is None:
            share = entry.shares[identity.key] = _Share(started_ns=identity.started_ns, moved_at=now)
            entry.ended_ns = None
        self._keep(entry)
        if share.status is not SweepStatus.RUNNING or share.started_ns != identity.started_ns:
            return
        if share.progress is None or share.progress.checked != progress.checked:
            share.moved_at = now
        share.progress, share.status, share.error = progress, progress.status, progress.error
        self._settle(entry)

    def fail_rank(self, key: RankKey, error: str, *, unless_started_ns: int | None = None) -> None:
        """A rank is gone: its running parts end as FAILED, except those of the life named."""
        for entry in self._entries.values():
            share = entry.shares.get(key)
            if share is None or share.status is not SweepStatus.RUNNING:
                continue
            if share.started_ns != unless_started_ns:
                share.status, share.error = SweepStatus.FAILED, error
                self._settle(entry)

    def time_out(self, now: float, timeout: float) -> list[tuple[str, RankKey]]:
        """Fail the parts that did not move for `timeout` seconds; returns (sweep id, rank) of each."""
        timed_out = []
        for sweep_id, entry in self._entries.items():
            for key, share in entry.shares.items():
                if share.status is SweepStatus.RUNNING and now - share.moved_at > timeout:
                    share.status = SweepStatus.FAILED
                    share.error = f"no progress for {timeout:g} s"
                    timed_out.append((sweep_id, key))
            self._settle(entry)
        return timed_out

    def find(self, sweep_id: str) -> SweepRecord | None:
        """One sweep by id."""
        entry = self._entries.get(sweep_id)
        return None if entry is None else _describe(entry)

    def newest_first(self, known: Mapping[str, int | None]) -> list[SweepRecord]:
        """Every sweep kept but those that `known` has with the end they have now."""
        return [
            _describe(entry)
            for name, entry in reversed(self._entries.items())
            if name not in known or known[name] != entry.ended_ns
        ]

    def ranks_running(self, sweep_id: str) -> list[RankKey]:
        """The ranks whose part in a sweep has not ended."""
        entry = self._entries.get(sweep_id)
        shares = entry.shares.items() if entry else ()
        return [key for key, share in shares if share.status is SweepStatus.RUNNING]

    def future(self, sweep_id: str) -> Future[SweepRecord]:
        """Resolves with the record at the sweep's end. Raises KeyError for an unknown id."""
        entry, waiter = self._entries[sweep_id], Future[SweepRecord]()
        entry.waiters.append(waiter)
        if entry.ended_ns is not None:
            _wake(entry)
        return waiter

    def _keep(self, entry: _Entry) -> None:
        self._entries.setdefault(entry.command.id, entry)
        while len(self._entries) > RECORDS_KEPT:
            ended = (name for name, kept in self._entries.items() if kept.ended_ns is not None)
            # With nothing ended to let go, the oldest goes: memory stays bounded whatever engines report.
            self._entries.pop(next(ended, next(iter(self._entries))))

    def _settle(self, entry: _Entry) -> None:
        if entry.ended_ns is None and entry.status is not SweepStatus.RUNNING:
            entry.ended_ns = time.time_ns()
            _wake(entry)


def _entry_of(progress: SweepProgress) -> _Entry:
    command = StartSweep(id=progress.id, groups=progress.groups, data=progress.data)
    return _Entry(
        command=command,
        trigger=progress.trigger,
        unlocked_only=None,
        swa_resident_only=None,
        requested_ns=progress.started_ns,
    )


def _wake(entry: _Entry) -> None:
    waiters, entry.waiters = entry.waiters, []
    record = _describe(entry)
    for waiter in waiters:
        if waiter.set_running_or_notify_cancel():
            waiter.set_result(record)


def _describe(entry: _Entry) -> SweepRecord:
    return SweepRecord(
        id=entry.command.id,
        trigger=entry.trigger,
        status=entry.status,
        groups=entry.command.groups,
        data=entry.command.data,
        unlocked_only=entry.unlocked_only,
        swa_resident_only=entry.swa_resident_only,
        requested_ns=entry.requested_ns,
        ended_ns=entry.ended_ns,
        ranks=tuple(
            RankSweep(key=key, status=share.status, progress=share.progress, error=share.error)
            for key, share in entry.shares.items()
        ),
    )
