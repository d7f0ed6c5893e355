"""The service's state: what engines reported, and the commands sent to them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import get_args

from canary_obs.config import ServiceConfig
from canary_obs.errors import WireError
from canary_obs.host_clock import boot_id
from canary_obs.hub.acknowledgements import AcknowledgementRecord, Acknowledgements, AcknowledgeRequest
from canary_obs.hub.commands import StartSweepRequest
from canary_obs.hub.counters import HubCounts
from canary_obs.hub.drills import DrillStore
from canary_obs.hub.heal_store import HealStore
from canary_obs.hub.incident_store import IncidentStore
from canary_obs.hub.message_check import LABEL_LENGTH, InvalidMessage, check_message
from canary_obs.hub.problems import Problems
from canary_obs.hub.rank_selection import EVERY_RANK, RankSelection
from canary_obs.hub.rank_table import PING_SECONDS, RankTable
from canary_obs.hub.ranks import Rank, RankView, rank_name, redetections_of
from canary_obs.hub.sweep_control import SavedSweeps, SweepControl
from canary_obs.hub.sweep_records import SweepRecord, SweepVersion
from canary_obs.hub.sweeps import SweepStore
from canary_obs.hub.taint_store import TaintStore
from canary_obs.hub.violation_store import ViolationEvent, ViolationFilter, ViolationStore
from canary_obs.records import (
    CancelSweep,
    Command,
    DrillReport,
    EngineMessage,
    Evidence,
    Heals,
    Hello,
    Pause,
    RankKey,
    Resume,
    Snapshot,
    StepUnderWay,
    SweepReport,
    Tainted,
    Violations,
)
from canary_obs.transport.sink import Reply
from canary_obs.vocabulary import HandshakeCause, State, worst

log = logging.getLogger("canary_obs")

Subscriber = Callable[[tuple[ViolationEvent, ...]], None]
_ALL_SEEN = AcknowledgeRequest()
_MESSAGE_TYPES = {struct: str(struct.__struct_config__.tag) for struct in get_args(EngineMessage)}


class Hub:
    """Implements MessageSink for the listeners; routes and exporters read and send commands. Thread-safe."""

    def __init__(
        self,
        config: ServiceConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        boot: str | None = None,
    ) -> None:
        """`clock` is time.monotonic but in tests, as `boot`, by default this host's boot id, implies."""
        self.config = ServiceConfig() if config is None else config
        self._clock, self._wall_ns = clock, wall_ns
        self._lock = threading.RLock()
        self._sweeps = SweepStore(wall_ns)
        self._ranks = RankTable(self.config, self._on_rank_restart, boot or boot_id())
        self._violation_store = ViolationStore(self.config.violations_kept)
        self.incidents = IncidentStore(
            self.config.incidents_kept, self.config.incident_quiet_seconds, wall_ns
        )
        self.taints = TaintStore()
        self.heals = HealStore(self.incidents)
        self.drills = DrillStore(clock=clock, wall_ns=wall_ns)
        self._handshakes: Counter[HandshakeCause] = Counter()
        self._messages: Counter[str] = Counter(dict.fromkeys(_MESSAGE_TYPES.values(), 0))
        self._problems = Problems()
        self.sweep_control = SweepControl(self._lock, self._ranks, self._sweeps, wall_ns)
        self.acknowledgements = Acknowledgements(
            self._lock, self._ranks, self.incidents, self._violation_store, self._problems, wall_ns
        )
        self._subscribers: list[Subscriber] = []

    # Messages from engines.

    def ingest(self, message: EngineMessage, reply: Reply) -> None:
        """Process one message; `reply` sends a command to its sender and must never block."""
        now = self._clock()
        with self._lock:
            self._messages[_MESSAGE_TYPES[type(message)]] += 1
            line: str | None = None
            events: tuple[ViolationEvent, ...] = ()
            try:
                check_message(message, self._ranks.newest_of(message.identity))
            except InvalidMessage as error:
                self._ranks.note_refusal(message.identity, str(error))
                sender = rank_name(message.identity.key)[:LABEL_LENGTH]
                line = self._problems.add_invalid(error, sender, now)
            else:
                events = self._accept(message, reply, now)
        if line is not None:
            log.warning("canary_obs: %s", line)
        if events:
            for subscriber in self._subscribers:
                subscriber(events)

    def _accept(self, message: EngineMessage, reply: Reply, now: float) -> tuple[ViolationEvent, ...]:
        rank = self._ranks.admit(message, reply, now)
        if rank is None:
            return ()
        events = self._apply(rank, message, now)
        if rank.hello is None and now - rank.last_ping > PING_SECONDS:
            self._ranks.ping(rank, now)
        return events

    def _on_rank_restart(self, key: RankKey, started_ns: int) -> None:
        self._sweeps.fail_rank(key, "the engine restarted", unless_started_ns=started_ns)

    def _apply(self, rank: Rank, message: EngineMessage, now: float) -> tuple[ViolationEvent, ...]:
        rank.departed = rank.acknowledged = False
        if isinstance(message, Hello):
            rank.hello = message
        elif isinstance(message, Snapshot):
            before = rank.snapshot.sweep if rank.snapshot else None
            if rank.snapshot is not None and redetections_of(message) > redetections_of(rank.snapshot):
                self.incidents.seen_again(message.identity, now)
            rank.update(message, now, self._wall_ns())
            # Every snapshot repeats the last sweep, in case its final SweepReport was dropped.
            if message.sweep is not None and message.sweep != before:
                self._sweeps.record_progress(message.identity, message.sweep, now)
        elif isinstance(message, StepUnderWay):
            config = self.config
            rank.note_step(message, now, config.snapshot_stale_seconds, config.step_timeout_seconds)
        elif isinstance(message, Violations):
            return self._add_violations(rank, message, now)
        elif isinstance(message, Evidence):
            self.incidents.add_evidence(message)
        elif isinstance(message, Tainted):
            filed = self.taints.incident_of(message)
            self.taints.add(message, filed or self.incidents.id_for(message.identity, message.incident))
        elif isinstance(message, DrillReport):
            self.drills.record_report(message)
        elif isinstance(message, SweepReport):
            self._sweeps.record_progress(message.identity, message.progress, now)
        elif isinstance(message, Heals):
            self.heals.add(message)
        else:
            rank.update(message.final, now, self._wall_ns())
            rank.depart(now, acknowledged=False)
            self._sweeps.fail_rank(message.identity.key, "the engine detached")
        return ()

    def _add_violations(self, rank: Rank, message: Violations, now: float) -> tuple[ViolationEvent, ...]:
        rows = rank.rows.new_rows(message.rows)
        if not rows:
            return ()
        incident = self.incidents.open_for(message.identity, now, message.incidents)
        new = Violations(identity=message.identity, rows=rows)
        rank.rows.file(incident, len(rows))
        events = self._violation_store.add(new, incident)
        for request in self.incidents.add_events(events, now):
            rank.reply(request)
        return events

    def undecodable_frame(self, error: WireError) -> None:
        """A frame could not be decoded; the verdict is at best DEGRADED until acknowledged."""
        with self._lock:
            self._problems.add_undecodable(error)

    def fault(self, part: str, error: Exception, state: State = State.BLIND) -> None:
        """A part of the service failed; the verdict is at best `state` until acknowledged."""
        with self._lock:
            self._problems.add_fault(part, error, state)

    def recovered(self, part: str) -> None:
        """A part of the service works again: its last fault is in the verdict no more, and stays counted."""
        with self._lock:
            self._problems.end_fault(part)

    def handshake_refused(self, cause: HandshakeCause) -> None:
        """A connection was refused. The verdict ignores it: anyone who reaches the port can cause one."""
        with self._lock:
            self._handshakes[cause] += 1

    def tick(self) -> None:
        """Send pings, begin and end sweeps, close incidents; called several times a second."""
        now, timeout = self._clock(), self.config.sweep_timeout_seconds
        with self._lock:
            for key in self._ranks.expire(now):
                self.drills.forget(key)
            self._ranks.send_due_pings(now)
            for rank in self._ranks:
                if self._ranks.is_silent(rank, now):
                    self._sweeps.fail_rank(rank.identity.key, "the rank went silent")
            for sweep_id, key in self._sweeps.time_out(now, timeout):
                if (stalled := self._ranks.find(key)) is not None:
                    stalled.reply(CancelSweep(id=sweep_id))
        self.sweep_control.tick(now)
        self.incidents.tick(now)

    # Requests of operators.

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call with every batch of new violations, on the listener's thread; must neither block nor raise."""
        self._subscribers.append(subscriber)

    def ranks(self) -> tuple[RankView, ...]:
        """Every known rank, sorted by key."""
        with self._lock:
            return self._ranks.views(self._clock())

    def verdict(self, now: float | None = None) -> tuple[State, tuple[str, ...]]:
        """The worst state of all ranks and of the service itself, with reasons; OFF without an engine."""
        with self._lock:
            states, reasons = self._ranks.verdicts(self._clock() if now is None else now)
            for state, problem in self._problems.verdicts():
                states.append(state)
                reasons.append(problem)
        return worst(states), tuple(reasons) if states or reasons else ("no engine is attached",)

    def counts(self) -> HubCounts:
        """Counts since the hub's start."""
        with self._lock:
            return HubCounts(
                messages=dict(self._messages), refused=self._ranks.refused, invalid=self._problems.invalid,
                undecodable=self._problems.undecodable, evicted=self._violation_store.evicted,
                expired=self._ranks.expired, faults=dict(self._problems.faults),
                handshakes={cause.value: self._handshakes[cause] for cause in HandshakeCause},
            )  # fmt: skip

    def start_sweep(self, request: StartSweepRequest, traceparent: str | None = None) -> SweepRecord:
        """Start a sweep, for the span that `traceparent` (W3C) names: see SweepControl.start."""
        return self.sweep_control.start(request, self._clock(), traceparent)

    def restore_sweeps(self, saved: SavedSweeps) -> None:
        """Go on with the sweeps of an earlier service. Call before the first message."""
        self.sweep_control.restore(saved, self._clock())

    def sweep(self, sweep_id: str) -> SweepRecord | None:
        """One sweep, if it is stored."""
        with self._lock:
            entry = self._sweeps.find(sweep_id)
            return None if entry is None else entry.record()

    def sweeps(self, known: Mapping[str, SweepVersion] | None = None) -> list[SweepRecord]:
        """Sweeps, newest first, except those whose version in `known` (by id) is still the same."""
        with self._lock:
            return self._sweeps.newest_first(known or {})

    def running_sweeps(self) -> list[SweepRecord]:
        """Sweeps that run on some rank, oldest first."""
        with self._lock:
            return [entry.record() for entry in self._sweeps if entry.running()]

    def sweep_future(self, sweep_id: str) -> Future[SweepRecord]:
        """A future that resolves at the sweep's end. Raises KeyError for an unknown id."""
        with self._lock:
            return self._sweeps.future(sweep_id)

    def violations(self, wanted: ViolationFilter | None = None) -> list[ViolationEvent]:
        """Stored violations that match the filter, newest first."""
        with self._lock:
            events = self._violation_store.newest_first()
        return events if wanted is None else [event for event in events if wanted.matches(event)]

    def pause(self, selection: RankSelection = EVERY_RANK) -> tuple[RankKey, ...]:
        """Pause sweeps and patrol on live ranks; returns which. Raises NoEngine or UnknownRank."""
        return self.send_command(Pause(), selection)

    def resume(self, selection: RankSelection = EVERY_RANK) -> tuple[RankKey, ...]:
        """Resume sweeps and patrol on live ranks; returns which. Raises NoEngine or UnknownRank."""
        return self.send_command(Resume(), selection)

    def missing_ranks(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """By (engine, instance) that is attached: numbers of its ranks that should report here and do not."""
        with self._lock:
            return self._ranks.missing(self._clock())

    def acknowledge(self, request: AcknowledgeRequest = _ALL_SEEN) -> AcknowledgementRecord:
        """Acknowledge what was seen; dismiss silent ranks and faults unless an incident is named.

        Raises UnknownIncident or UnknownRank.
        """
        return self.acknowledgements.add(request, self._clock())

    def send_command(self, command: Command, selection: RankSelection = EVERY_RANK) -> tuple[RankKey, ...]:
        """Send a command to live ranks; returns their keys. Raises NoEngine or UnknownRank."""
        with self._lock:
            live = self._ranks.live(self._clock(), selection)
            for rank in live:
                rank.reply(command)
            return tuple(rank.identity.key for rank in live)
