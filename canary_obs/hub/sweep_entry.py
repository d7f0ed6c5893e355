"""A sweep in the hub: its mutable state, and that of each rank in it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from canary_obs.hub.commands import StartSweepRequest
from canary_obs.hub.sweep_records import RankSweep, SweepRecord, SweepVersion
from canary_obs.records import RankKey, SweepProgress
from canary_obs.vocabulary import SweepStatus, Trigger

_SAMPLES = 32  # of a rank's progress, for its rate
_SAMPLE_SECONDS = 0.2
# The first of these that any rank has is the sweep's status: a failure must not hide a violation.
_PRECEDENCE = (
    SweepStatus.RUNNING,
    SweepStatus.VIOLATED,
    SweepStatus.FAILED,
    SweepStatus.CANCELLED,
    SweepStatus.PASSED,
)


@dataclass(slots=True, kw_only=True)
class RankEntry:
    """One rank's part. `progressed_at` and samples are of the hub's clock."""

    started_ns: int  # of its process
    progressed_at: float
    status: SweepStatus = SweepStatus.RUNNING
    progress: SweepProgress | None = None
    error: str | None = None
    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    def note(self, progress: SweepProgress, now: float) -> None:
        """Take what the rank reports."""
        moved = self.progress is None or self.progress.checked != progress.checked
        if moved or progress.paused:
            self.progressed_at = now
        self.progress, self.status, self.error = progress, progress.status, progress.error
        if progress.paused:
            self.samples.clear()
        elif not self.samples or now - self.samples[-1][0] >= _SAMPLE_SECONDS:
            self.samples.append((now, _done(progress)))

    def reported_end(self) -> int | None:
        """The end by the rank's own report; None without one."""
        if self.progress is None or self.progress.status is SweepStatus.RUNNING:
            return None
        return self.progress.started_ns + round(self.progress.seconds * 1e9)

    def view(self, key: RankKey) -> RankSweep:
        """An immutable copy."""
        rate = self._rate() if self.status is SweepStatus.RUNNING else None
        left = self.progress.total - _done(self.progress) if self.progress and rate else None
        return RankSweep(
            key=key, status=self.status, progress=self.progress, error=self.error, slots_per_second=rate,
            eta_seconds=None if left is None or rate is None else max(0, left) / rate,
            process_started_ns=self.started_ns,
        )  # fmt: skip

    def _rate(self) -> float | None:
        if len(self.samples) < 2:
            return None
        (began, before), (ended, done) = self.samples[0], self.samples[-1]
        return (done - before) / (ended - began) or None


@dataclass(slots=True, kw_only=True)
class SweepEntry:
    """A sweep, its ranks, and the futures that resolve at its end."""

    id: str
    trigger: Trigger
    groups: tuple[str, ...]
    data: bool
    requested_ns: int
    request: StartSweepRequest | None = None  # None = started by an engine
    traceparent: str | None = None
    begun_ns: int | None = None
    begins_ns: int | None = None
    deadline: float | None = None  # hub's clock
    paused: bool = False
    error: str | None = None
    ended_ns: int | None = None
    ended_early: SweepStatus | None = None  # it ended before any rank was asked
    ranks: dict[RankKey, RankEntry] = field(default_factory=dict)
    waiters: list[Future[SweepRecord]] = field(default_factory=list)

    @property
    def status(self) -> SweepStatus:
        """The sweep's status over all ranks."""
        if self.ended_early is not None:
            return self.ended_early
        if self.begun_ns is None:
            return SweepStatus.SCHEDULED
        return min((rank.status for rank in self.ranks.values()), key=_PRECEDENCE.index)

    @property
    def version(self) -> SweepVersion:
        """That of its record."""
        return self.begun_ns, self.paused, self.ended_ns, *self._by_status().items()

    def running(self) -> list[RankKey]:
        """The ranks on which it has not ended."""
        return [key for key, rank in self.ranks.items() if rank.status is SweepStatus.RUNNING]

    def end_ranks(self, keys: Iterable[RankKey], status: SweepStatus, error: str) -> None:
        """End it on these ranks, for a reason that they did not report."""
        for key in keys:
            rank = self.ranks[key]
            rank.status, rank.error = status, error

    def reported_end(self) -> int | None:
        """The end that the ranks report of a sweep that this service did not start; None if one reports none.

        It may be long ago, as every snapshot repeats the rank's last sweep.
        """
        ends = [rank.reported_end() for rank in self.ranks.values()]
        known = [end for end in ends if end is not None]
        return None if self.request is not None or len(known) < len(ends) else max(known)

    def record(self) -> SweepRecord:
        """An immutable copy."""
        ranks = tuple(rank.view(key) for key, rank in self.ranks.items())
        seen = [rank.progress for rank in ranks if rank.progress is not None]
        rates = [rank.slots_per_second for rank in ranks if rank.slots_per_second is not None]
        etas = [rank.eta_seconds for rank in ranks if rank.status is SweepStatus.RUNNING]
        known = [eta for eta in etas if eta is not None]
        request = self.request
        return SweepRecord(
            id=self.id, trigger=self.trigger, status=self.status, groups=self.groups, data=self.data,
            unlocked_only=None if request is None else request.unlocked_only,
            swa_resident_only=None if request is None else request.swa_resident_only,
            requested_ns=self.requested_ns, ended_ns=self.ended_ns, ranks=ranks,
            traceparent=self.traceparent, request=request, begun_ns=self.begun_ns, begins_ns=self.begins_ns,
            paused=self.paused, error=self.error, total=sum(progress.total for progress in seen),
            checked=sum(progress.checked for progress in seen),
            violations=sum(progress.violations for progress in seen),
            slots_per_second=sum(rates) if rates else None,
            eta_seconds=max(known) if known and len(known) == len(etas) else None,
            ranks_by_status=self._by_status(),
        )  # fmt: skip

    def resolve_waiters(self) -> None:
        """Resolve the futures with the record."""
        waiters, self.waiters = self.waiters, []
        record = self.record()
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(record)

    def _by_status(self) -> dict[SweepStatus, int]:
        return dict(Counter(rank.status for rank in self.ranks.values()))


def reported_entry(progress: SweepProgress) -> SweepEntry:
    """A sweep that the service did not start."""
    return SweepEntry(
        id=progress.id, trigger=progress.trigger, groups=progress.groups, data=progress.data,
        requested_ns=progress.started_ns, begun_ns=progress.started_ns,
    )  # fmt: skip


def restored_entry(record: SweepRecord, now: float) -> SweepEntry:
    """A sweep as it was when the service ended."""
    entry = SweepEntry(
        id=record.id, trigger=record.trigger, groups=record.groups, data=record.data,
        requested_ns=record.requested_ns, request=record.request, traceparent=record.traceparent,
        begun_ns=record.begun_ns, begins_ns=record.begins_ns, paused=record.paused, error=record.error,
        ended_ns=record.ended_ns,
    )  # fmt: skip
    if not record.ranks and record.ended_ns is not None:
        entry.ended_early = record.status
    for rank in record.ranks:
        entry.ranks[rank.key] = RankEntry(
            started_ns=rank.process_started_ns, progressed_at=now, status=rank.status,
            progress=rank.progress, error=rank.error,
        )  # fmt: skip
    return entry


def _done(progress: SweepProgress) -> int:
    return progress.checked + sum(progress.skipped.values())
