"""Operators' sweeps: started, held, ended in time, and kept over a restart of the service."""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from canary_obs.hub.commands import NoEngine, StartSweepRequest, UnknownGroup
from canary_obs.hub.rank_selection import UnknownRank
from canary_obs.hub.rank_table import RankTable
from canary_obs.hub.ranks import Rank
from canary_obs.hub.sweep_entry import RankEntry, SweepEntry, restored_entry
from canary_obs.hub.sweep_records import SweepRecord
from canary_obs.hub.sweep_window import SweepWindow
from canary_obs.hub.sweeps import SweepInProgress, SweepStore
from canary_obs.records import CancelSweep, Command, PauseSweep, ResumeSweep
from canary_obs.vocabulary import SweepStatus, Trigger

KEYS_KEPT = 1024
SAVED = 64  # of the operators' sweeps


class SavedSweeps(msgspec.Struct, frozen=True, kw_only=True):
    """What outlives the service: operators' sweeps, oldest first, and the keys they were started with."""

    sweeps: tuple[SweepRecord, ...]
    idempotency_keys: dict[str, tuple[StartSweepRequest, str]]  # request, sweep id


class SweepControl:
    """Thread-safe: it shares the hub's lock. `now` is the hub's clock."""

    def __init__(
        self, lock: threading.RLock, ranks: RankTable, store: SweepStore, wall_ns: Callable[[], int]
    ) -> None:
        self._lock, self._ranks, self._store, self._wall_ns = lock, ranks, store, wall_ns
        # Request and sweep id by Idempotency-Key, oldest first.
        self._keys: OrderedDict[str, tuple[StartSweepRequest, str]] = OrderedDict()

    def start(self, request: StartSweepRequest, now: float, traceparent: str | None) -> SweepRecord:
        """Start a sweep on its ranks, or once its window opens.

        Raises NoEngine, UnknownRank, UnknownGroup or SweepInProgress.
        """
        with self._lock:
            live = self._ranks.live(now, request.selection)
            known = {group.name for rank in live if rank.hello for group in rank.hello.groups}
            if known and (unknown := sorted(set(request.groups) - known)):
                raise UnknownGroup(unknown, sorted(known))
            wall_ns = self._wall_ns()
            entry = SweepEntry(
                id=uuid.uuid4().hex, trigger=Trigger.DEMAND, groups=request.groups, data=request.data,
                requested_ns=wall_ns, request=request, traceparent=traceparent,
            )  # fmt: skip
            window = _window_of(entry)
            if window is not None and not window.contains(wall_ns):
                entry.begins_ns = window.opens_ns(wall_ns)
                self._store.add(entry)
                return entry.record()
            if (running := self._store.running_on([rank.identity.key for rank in live])) is not None:
                raise SweepInProgress(running)
            self._begin(entry, live, now)
            return entry.record()

    def cancel(self, sweep_id: str) -> SweepRecord | None:
        """Ask the ranks that still run a sweep to cancel it; their reports end it. None for an unknown id."""
        with self._lock:
            entry = self._store.find(sweep_id)
            if entry is None:
                return None
            if entry.status is SweepStatus.SCHEDULED:
                self._end_early(entry, SweepStatus.CANCELLED, "cancelled before its window opened")
            self._send(entry, CancelSweep(id=sweep_id))
            return entry.record()

    def hold(self, sweep_id: str, *, paused: bool) -> SweepRecord | None:
        """Pause or resume one sweep, which may wait for its window. None for an unknown id."""
        with self._lock:
            entry = self._store.find(sweep_id)
            if entry is None:
                return None
            if entry.ended_ns is None and entry.paused is not paused:
                entry.paused = paused
                self._store.revision += 1
                self._send(entry, PauseSweep(id=sweep_id) if paused else ResumeSweep(id=sweep_id))
            return entry.record()

    def tick(self, now: float) -> None:
        """Begin sweeps whose window has opened; end those whose window or deadline has passed."""
        with self._lock:
            wall_ns = self._wall_ns()
            for entry in list(self._store):
                window = _window_of(entry)
                if entry.status is SweepStatus.SCHEDULED:
                    if window is not None and window.contains(wall_ns) and not entry.paused:
                        self._begin_scheduled(entry, now)
                elif entry.status is SweepStatus.RUNNING and entry.request is not None:
                    if entry.deadline is not None and now > entry.deadline:
                        seconds = entry.request.deadline_seconds
                        self._end_running(entry, SweepStatus.FAILED, f"not done after {seconds:g} s")
                    elif window is not None and not window.contains(wall_ns):
                        error = f"its window {entry.request.window} UTC has closed"
                        self._end_running(entry, SweepStatus.CANCELLED, error)

    def idempotent(self, key: str) -> tuple[StartSweepRequest, SweepRecord | None] | None:
        """The request that came with an Idempotency-Key, and its sweep, if it is kept; None = a new key."""
        with self._lock:
            if key not in self._keys:
                return None
            request, sweep_id = self._keys[key]
            entry = self._store.find(sweep_id)
            return request, None if entry is None else entry.record()

    def remember_key(self, key: str, request: StartSweepRequest, sweep_id: str) -> None:
        """A sweep was started with this Idempotency-Key."""
        with self._lock:
            self._keys[key] = request, sweep_id
            self._store.revision += 1
            if len(self._keys) > KEYS_KEPT:
                self._keys.popitem(last=False)

    @property
    def revision(self) -> int:
        """Another one whenever `saved` has changed."""
        return self._store.revision

    def saved(self) -> SavedSweeps:
        """What is to outlive the service."""
        with self._lock:
            own = [entry for entry in self._store if entry.request is not None]
            sweeps = tuple(entry.record() for entry in own[-SAVED:])
            return SavedSweeps(sweeps=sweeps, idempotency_keys=dict(self._keys))

    def restore(self, saved: SavedSweeps, now: float) -> None:
        """Go on with what an earlier service had started. Call before the first message."""
        with self._lock:
            self._keys.update(saved.idempotency_keys)
            for record in saved.sweeps:
                entry = restored_entry(record, now)
                self._set_deadline(entry, now)
                self._store.add(entry)

    def _begin(self, entry: SweepEntry, live: list[Rank], now: float) -> None:
        assert entry.request is not None
        entry.begun_ns, entry.begins_ns = self._wall_ns(), None
        self._set_deadline(entry, now)
        for rank in live:
            identity = rank.identity
            entry.ranks[identity.key] = RankEntry(started_ns=identity.started_ns, progressed_at=now)
        for key, error in self._ranks.unreachable(now, entry.request.selection).items():
            entry.ranks[key] = RankEntry(
                started_ns=0, progressed_at=now, status=SweepStatus.FAILED, error=error
            )
        self._store.add(entry)
        self._send(entry, entry.request.command(entry.id))

    def _begin_scheduled(self, entry: SweepEntry, now: float) -> None:
        assert entry.request is not None
        try:
            live = self._ranks.live(now, entry.request.selection)
        except (NoEngine, UnknownRank):
            return  # its window may be long
        if self._store.running_on([rank.identity.key for rank in live]) is None:
            self._begin(entry, live, now)

    def _set_deadline(self, entry: SweepEntry, now: float) -> None:
        request = entry.request
        if request is not None and request.deadline_seconds is not None and entry.begun_ns is not None:
            entry.deadline = now + request.deadline_seconds - (self._wall_ns() - entry.begun_ns) / 1e9

    def _end_running(self, entry: SweepEntry, status: SweepStatus, error: str) -> None:
        self._send(entry, CancelSweep(id=entry.id))
        entry.error = error
        entry.end_ranks(entry.running(), status, error)
        self._store.finish_if_done(entry)

    def _end_early(self, entry: SweepEntry, status: SweepStatus, error: str) -> None:
        entry.ended_early, entry.error, entry.begins_ns = status, error, None
        self._store.finish_if_done(entry)

    def _send(self, entry: SweepEntry, command: Command) -> None:
        for key in entry.running():
            if (rank := self._ranks.find(key)) is not None:
                rank.reply(command)


def _window_of(entry: SweepEntry) -> SweepWindow | None:
    text = None if entry.request is None else entry.request.window
    return None if text is None else SweepWindow.parse(text)
