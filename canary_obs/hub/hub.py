"""The service's memory: every rank's latest word, the violations of late, sweeps, and the way back."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import get_args

import msgspec

from canary_obs.config import ServiceConfig
from canary_obs.errors import WireError
from canary_obs.hub.commands import NoEngine, StartSweepRequest, UnknownGroup
from canary_obs.hub.counters import HandshakeCounts, HubCounts
from canary_obs.hub.drills import DrillStore
from canary_obs.hub.incident_store import IncidentStore
from canary_obs.hub.ranks import Rank, RankView, Reply, label
from canary_obs.hub.sweeps import RankKey, SweepRecord, SweepStore
from canary_obs.hub.violation_store import ViolationEvent, ViolationFilter, ViolationStore
from canary_obs.records import (
    Acknowledge,
    CancelSweep,
    Command,
    DrillReport,
    EngineMessage,
    Evidence,
    Hello,
    Pause,
    Ping,
    Resume,
    Snapshot,
    StartSweep,
    SweepReport,
    Violations,
)
from canary_obs.vocabulary import State, worst

PING_SECONDS = 0.5
RANKS_KEPT = 1024

Subscriber = Callable[[tuple[ViolationEvent, ...]], None]
_KINDS = {kind: str(kind.__struct_config__.tag) for kind in get_args(EngineMessage)}


class Hub:
    """Thread-safe. Listeners call `ingest` and `tick`; the web side reads and sends commands."""

    def __init__(
        self,
        config: ServiceConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.config = ServiceConfig() if config is None else config
        self._clock, self._wall_ns = clock, wall_ns
        self._lock = threading.RLock()
        self._ranks: dict[RankKey, Rank] = {}
        self._sweeps = SweepStore()
        self._violation_store = ViolationStore(self.config.violations_kept)
        self.incidents = IncidentStore(
            self.config.incidents_kept, self.config.incident_quiet_seconds, wall_ns
        )
        self.drills = DrillStore(wall_ns)
        self.handshakes = HandshakeCounts()
        self._messages: Counter[str] = Counter(dict.fromkeys(_KINDS.values(), 0))
        self._refused = self._undecodable = 0
        self._faults: Counter[str] = Counter()
        self._troubles: dict[str, tuple[State, str]] = {}  # by part; until acknowledged
        self._subscribers: list[Subscriber] = []

    # What engines say.

    def ingest(self, message: EngineMessage, reply: Reply) -> None:
        """Take in one message; `reply` reaches its sender and must never block."""
        now = self._clock()
        with self._lock:
            self._messages[_KINDS[type(message)]] += 1
            rank = self._admit(message, reply, now)
            if rank is None:
                return
            events = self._absorb(rank, message, now)
            if rank.hello is None and now - rank.pinged > PING_SECONDS:
                self._ping(rank, now)
        if events:
            for subscriber in self._subscribers:
                subscriber(events)

    def _admit(self, message: EngineMessage, reply: Reply, now: float) -> Rank | None:
        identity = message.identity
        rank = self._ranks.get(identity.key)
        if rank is None:
            self._make_room()
            rank = self._ranks[identity.key] = Rank(identity, reply, now)
        elif identity.started_ns != rank.identity.started_ns:
            # A clock set back can make a successor look older; then its predecessor's silence decides.
            if identity.started_ns < rank.identity.started_ns and not self._gone(rank, now):
                self._refuse(rank, message, now)
                return None
            rank.restarted(identity)
            error = "the engine restarted"
            self._sweeps.lose(identity.key, error, unless_started_ns=identity.started_ns)
        rank.reply, rank.heard = reply, now
        return rank

    def _refuse(self, rank: Rank, message: EngineMessage, now: float) -> None:
        self._refused += 1
        # What was still queued when its successor started is no sign of life.
        if isinstance(message, Snapshot) and message.time_ns > rank.identity.started_ns:
            rank.duplicate, rank.duplicate_heard = message.identity, now

    def _make_room(self) -> None:
        while len(self._ranks) >= RANKS_KEPT:
            del self._ranks[min(self._ranks, key=lambda key: self._ranks[key].heard)]

    def _absorb(self, rank: Rank, message: EngineMessage, now: float) -> tuple[ViolationEvent, ...]:
        key = message.identity.key
        rank.departed = rank.acknowledged = False
        if isinstance(message, Hello):
            rank.hello = message
        elif isinstance(message, Snapshot):
            before = rank.snapshot.sweep if rank.snapshot else None
            rank.take(message, now, self._wall_ns())
            # A final report may have been dropped; the snapshot carries it too, but again and again.
            if message.sweep is not None and message.sweep != before:
                self._sweeps.observe(message.identity, message.sweep, now)
        elif isinstance(message, Violations):
            return self._enter(rank, message, now)
        elif isinstance(message, Evidence):
            self.incidents.add(message)
        elif isinstance(message, DrillReport):
            self.drills.observe(message)
        elif isinstance(message, SweepReport):
            self._sweeps.observe(message.identity, message.progress, now)
        else:
            rank.take(message.final, now, self._wall_ns())
            rank.departed = True
            self._sweeps.lose(key, "the engine detached")
        return ()

    def _enter(self, rank: Rank, message: Violations, now: float) -> tuple[ViolationEvent, ...]:
        events = self._violation_store.add(message, self.incidents.open_for(message.identity, now))
        for command in self.incidents.record(events, now):
            rank.reply(command)
        return events

    def undecodable(self, error: WireError) -> None:
        """A frame was not ours, or of another version; the last error is shown in the verdict."""
        with self._lock:
            self._undecodable += 1
            text = f"undecodable frames: {self._undecodable}, the last: {error}"
            self._troubles["wire"] = State.DEGRADED, text

    def fault(self, part: str, error: Exception, state: State = State.BLIND) -> None:
        """A part of the service failed; the verdict is at best `state` until acknowledged."""
        with self._lock:
            self._faults[part] += 1
            self._troubles[part] = state, f"the service failed: {part}: {type(error).__name__}: {error}"

    def tick(self) -> None:
        """Ping ranks and end sweeps that will never be answered. Listeners call it often."""
        now, timeout = self._clock(), self.config.sweep_timeout_seconds
        with self._lock:
            for key, rank in self._ranks.items():
                if not rank.departed and now - rank.pinged >= PING_SECONDS:
                    self._ping(rank, now)
                if self._gone(rank, now):
                    self._sweeps.lose(key, "the rank went silent")
            for sweep_id, key in self._sweeps.give_up(now, timeout):
                if key in self._ranks:
                    self._ranks[key].reply(CancelSweep(id=sweep_id))
        self.incidents.tick(now)

    def _ping(self, rank: Rank, now: float) -> None:
        rank.pinged = now
        rank.reply(Ping(want_hello=rank.hello is None))

    def _gone(self, rank: Rank, now: float) -> bool:
        age = rank.snapshot_age(now)
        silent = now - rank.heard if age is None else age
        return rank.departed or silent > self.config.snapshot_stale_seconds

    # What operators ask.

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call with every batch of new violations, on the listener's thread; must neither block nor raise."""
        self._subscribers.append(subscriber)

    def ranks(self) -> tuple[RankView, ...]:
        """Every rank known, by key."""
        now = self._clock()
        with self._lock:
            stale = self.config.snapshot_stale_seconds
            return tuple(self._ranks[key].view(now, stale) for key in sorted(self._ranks))

    def verdict(self, now: float | None = None) -> tuple[State, tuple[str, ...]]:
        """The worst of all ranks and of the service itself, with reasons; OFF when no engine is attached."""
        now = self._clock() if now is None else now
        states: list[State] = []
        reasons: list[str] = []
        with self._lock:
            for key in sorted(self._ranks):
                state, why = self._ranks[key].verdict(now, self.config.snapshot_stale_seconds)
                if state is not State.OFF:
                    states.append(state)
                    reasons += [f"{label(key)}: {reason}" for reason in why]
            for state, trouble in self._troubles.values():
                states.append(state)
                reasons.append(trouble)
        return worst(states), tuple(reasons) if states else ("no engine is attached",)

    def counts(self) -> HubCounts:
        """What the hub did since its start."""
        with self._lock:
            return HubCounts(
                messages=dict(self._messages), refused=self._refused, undecodable=self._undecodable,
                evicted=self._violation_store.evicted, faults=dict(self._faults),
                handshakes=self.handshakes.counts(),
            )  # fmt: skip

    def start_sweep(self, request: StartSweepRequest) -> SweepRecord:
        """Ask every live rank. Raises NoEngine, UnknownGroup or SweepInProgress."""
        now = self._clock()
        with self._lock:
            live = self._live(now)
            known = {group.name for rank in live if rank.hello for group in rank.hello.groups}
            if known and (unknown := sorted(set(request.groups) - known)):
                raise UnknownGroup(unknown, sorted(known))
            command = StartSweep(id=uuid.uuid4().hex, **msgspec.structs.asdict(request))
            record = self._sweeps.begin(command, [rank.identity for rank in live], now)
            for rank in live:
                rank.reply(command)
            return record

    def cancel(self, sweep_id: str) -> SweepRecord | None:
        """Ask the ranks that still run it to stop; None for an unknown id. The end comes by their reports."""
        with self._lock:
            for key in self._sweeps.ranks_running(sweep_id):
                if key in self._ranks:
                    self._ranks[key].reply(CancelSweep(id=sweep_id))
            return self._sweeps.find(sweep_id)

    def sweep(self, sweep_id: str) -> SweepRecord | None:
        """One sweep, if it is still kept."""
        with self._lock:
            return self._sweeps.find(sweep_id)

    def sweeps(self, known: Mapping[str, int | None] | None = None) -> list[SweepRecord]:
        """Sweeps, newest first; without those that `known` has with the end they have now."""
        with self._lock:
            return self._sweeps.newest_first(known or {})

    def sweep_future(self, sweep_id: str) -> Future[SweepRecord]:
        """Resolves at the sweep's end; for asyncio.wrap_future. Raises KeyError for an unknown id."""
        with self._lock:
            return self._sweeps.future(sweep_id)

    def violations(self, wanted: ViolationFilter | None = None) -> list[ViolationEvent]:
        """Violations kept that pass the filter, newest first."""
        with self._lock:
            events = self._violation_store.newest_first()
        return events if wanted is None else [event for event in events if wanted.admits(event)]

    def pause(self) -> int:
        """Stop sweeps and patrol on every live rank; returns how many. Raises NoEngine."""
        return len(self.order(Pause()))

    def resume(self) -> int:
        """Undo pause; returns how many ranks were asked. Raises NoEngine."""
        return len(self.order(Resume()))

    def acknowledge(self) -> int:
        """An operator has seen everything: live ranks are told, dead ones and past faults are dismissed."""
        now = self._clock()
        self.incidents.acknowledge()
        with self._lock:
            self._troubles.clear()
            for rank in self._ranks.values():
                if self._gone(rank, now):
                    rank.departed = rank.acknowledged = True
                else:
                    rank.reply(Acknowledge())
            return sum(not rank.departed for rank in self._ranks.values())

    def order(self, command: Command) -> list[RankKey]:
        """Send a command to every live rank; returns which. Raises NoEngine."""
        with self._lock:
            live = self._live(self._clock())
            for rank in live:
                rank.reply(command)
            return [rank.identity.key for rank in live]

    def _live(self, now: float) -> list[Rank]:
        live = [rank for rank in self._ranks.values() if not self._gone(rank, now)]
        if not live:
            _, reasons = self.verdict(now)
            raise NoEngine(f"no engine can answer: {'; '.join(reasons)}")
        return live
