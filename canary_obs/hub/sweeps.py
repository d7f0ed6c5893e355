"""Sweeps on the ranks: one record per sweep id, over all ranks that take part."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future

from canary_obs.errors import CanaryError
from canary_obs.hub.sweep_entry import RankEntry, SweepEntry, reported_entry
from canary_obs.hub.sweep_records import SweepRecord, SweepVersion
from canary_obs.records import Identity, RankKey, SweepProgress
from canary_obs.vocabulary import SweepStatus

RECORDS_KEPT = 256


class SweepInProgress(CanaryError):
    """An operator's sweep is running on a rank that is asked; `running_id` is its id."""

    def __init__(self, running_id: str) -> None:
        self.running_id = running_id
        super().__init__(f"sweep {running_id} is running; wait for its end or cancel it first")


class SweepStore:
    """Recent sweeps by id. Not thread-safe: the hub holds its lock around every call."""

    def __init__(self, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._wall_ns = wall_ns
        self._entries: OrderedDict[str, SweepEntry] = OrderedDict()
        self.revision = 0  # another one whenever a sweep began, changed hands or ended anywhere

    def __iter__(self) -> Iterator[SweepEntry]:
        return iter(self._entries.values())

    def running_on(self, keys: Collection[RankKey]) -> str | None:
        """The id of the operator's sweep that is running on one of these ranks."""
        for entry in reversed(self._entries.values()):
            if entry.request is not None and not set(keys).isdisjoint(entry.running()):
                return entry.id
        return None

    def add(self, entry: SweepEntry) -> None:
        """Keep a sweep; the oldest that has ended makes room."""
        self.revision += 1
        self._entries.setdefault(entry.id, entry)
        while len(self._entries) > RECORDS_KEPT:
            ended = (sweep_id for sweep_id, kept in self._entries.items() if kept.ended_ns is not None)
            # If none has ended, the oldest is evicted: memory stays bounded whatever engines report.
            self._entries.pop(next(ended, next(iter(self._entries))))

    def record_progress(self, identity: Identity, progress: SweepProgress, now: float) -> None:
        """Record one rank's progress; a sweep that the service did not start is recorded, too."""
        entry = self._entries.get(progress.id)
        if entry is None:
            entry = reported_entry(progress)
        rank = entry.ranks.get(identity.key)
        if rank is None:
            rank = entry.ranks[identity.key] = RankEntry(started_ns=identity.started_ns, progressed_at=now)
            entry.ended_ns = None
            self.revision += 1
        if entry.id not in self._entries:
            self.add(entry)
        if rank.status is not SweepStatus.RUNNING or rank.started_ns != identity.started_ns:
            return
        rank.note(progress, now)
        self.finish_if_done(entry)

    def fail_rank(self, key: RankKey, error: str, *, unless_started_ns: int | None = None) -> None:
        """End the running sweeps of a rank as FAILED, except those of the process with this started_ns."""
        for entry in self._entries.values():
            rank = entry.ranks.get(key)
            if rank is None or rank.status is not SweepStatus.RUNNING:
                continue
            if rank.started_ns != unless_started_ns:
                entry.end_ranks([key], SweepStatus.FAILED, error)
                self.finish_if_done(entry)

    def time_out(self, now: float, timeout: float) -> list[tuple[str, RankKey]]:
        """Fail the ranks without progress for `timeout` seconds; returns (sweep id, rank) of each."""
        timed_out = []
        for entry in self._entries.values():
            late = [key for key in entry.running() if now - entry.ranks[key].progressed_at > timeout]
            entry.end_ranks(late, SweepStatus.FAILED, f"no progress for {timeout:g} s")
            timed_out += [(entry.id, key) for key in late]
            if late:
                self.finish_if_done(entry)
        return timed_out

    def find(self, sweep_id: str) -> SweepEntry | None:
        """One sweep by id."""
        return self._entries.get(sweep_id)

    def newest_first(self, known: Mapping[str, SweepVersion]) -> list[SweepRecord]:
        """Sweeps, except those whose version in `known` (by id) is still the same."""
        return [
            entry.record()
            for sweep_id, entry in reversed(self._entries.items())
            if sweep_id not in known or known[sweep_id] != entry.version
        ]

    def future(self, sweep_id: str) -> Future[SweepRecord]:
        """A future that resolves with the record at the sweep's end. Raises KeyError for an unknown id."""
        entry, waiter = self._entries[sweep_id], Future[SweepRecord]()
        entry.waiters.append(waiter)
        if entry.ended_ns is not None:
            entry.resolve_waiters()
        return waiter

    def finish_if_done(self, entry: SweepEntry) -> None:
        """End a sweep that runs on no rank any more."""
        if entry.status is not SweepStatus.RUNNING:
            self.revision += 1
        if entry.ended_ns is None and entry.status not in (SweepStatus.RUNNING, SweepStatus.SCHEDULED):
            entry.ended_ns = entry.reported_end() or self._wall_ns()
            entry.resolve_waiters()
