"""One rank in the hub: its latest messages, its counters and state, and how to reach it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from canary_obs.hub.clocks import SnapshotClock
from canary_obs.hub.lives import Lives
from canary_obs.hub.row_account import RowAccount
from canary_obs.plurals import counted
from canary_obs.records import Acknowledge, Hello, Identity, RankKey, Snapshot, StepUnderWay
from canary_obs.transport.sink import Reply
from canary_obs.vocabulary import State, worst

START_SECONDS = 15.0  # from a rank's first message to its first snapshot, at most


def rank_name(key: RankKey) -> str:
    """`engine/instance/rank`, for people."""
    return "/".join(map(str, key))


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """A rank at one moment. `totals` are the snapshot's counters summed over restarts; ages in seconds."""

    identity: Identity
    hello: Hello | None
    snapshot: Snapshot | None
    totals: Snapshot | None
    snapshot_age: float | None  # since the snapshot was taken; None = none yet
    silent_seconds: float  # since the rank's last message
    clock_skew_seconds: float | None  # the engine's wall clock minus the service's; None = no snapshot yet
    step_seconds: float | None  # age of the step that delays its snapshots; None = no such step
    departed: bool  # detached, or dismissed by an operator
    restarts: int
    state: State
    reasons: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _EndedFindings:
    """What a process that has ended had found, and nobody acknowledged."""

    pid: int
    violations: int
    rows: RowAccount

    def acknowledge(self, incident: str) -> bool:
        """Whether violations are left without those of this incident."""
        self.violations -= self.rows.acknowledge_incident(incident)
        return self.violations > 0


@dataclass(slots=True)
class Rank:
    """A rank's mutable entry in the hub, under the hub's lock. Times are the hub's clock."""

    identity: Identity
    reply: Reply
    last_message: float
    clock: SnapshotClock
    began: float  # first message of this process
    hello: Hello | None = None
    snapshot: Snapshot | None = None
    lives: Lives = field(default_factory=Lives)
    rows: RowAccount = field(default_factory=RowAccount)  # of this process
    acknowledged_violations: int = 0  # of this process
    inherited: tuple[_EndedFindings, ...] = ()  # of earlier processes, until they are acknowledged
    snapshot_received: float = 0.0
    departed: bool = False
    departed_at: float = float("-inf")
    acknowledged: bool = False  # an operator acknowledged that it departed
    restarts: int = 0
    last_ping: float = float("-inf")
    step: StepUnderWay | None = None  # the last one that was received
    step_received: float = float("-inf")
    step_excuses_until: float = float("-inf")  # until then, no snapshot is no sign of silence
    refused: str | None = None  # why its latest message was refused; None = a snapshot was accepted since
    duplicate: Identity | None = None  # an older process that reports as the same rank
    duplicate_last_message: float = float("-inf")

    @property
    def totals(self) -> Snapshot | None:
        """Counters summed over restarts; None until the first snapshot."""
        return self.lives.totals(self.snapshot)

    def restart(self, identity: Identity, now: float) -> None:
        """Continue with another process under the same key, keeping totals and what was not acknowledged."""
        self.inherited += self._unacknowledged()
        self.lives.begin(identity.started_ns, self.identity.started_ns, self.snapshot)
        self.snapshot, self.hello, self.step, self.refused = None, None, None, None
        self.step_excuses_until = float("-inf")
        self.clock = SnapshotClock(self.clock.boot_id)
        self.rows, self.acknowledged_violations = RowAccount(), 0
        self.identity, self.departed, self.began = identity, False, now
        self.restarts += 1

    def _unacknowledged(self) -> tuple[_EndedFindings, ...]:
        snapshot = self.snapshot
        if snapshot is None or snapshot.state is not State.VIOLATED or (self.departed and self.acknowledged):
            return ()
        found = violations_of(snapshot) - self.acknowledged_violations
        if found <= 0:  # acknowledged, and the process ended before it could say so
            return ()
        return (_EndedFindings(pid=self.identity.pid, violations=found, rows=self.rows),)

    def update(self, snapshot: Snapshot, now: float, wall_ns: int) -> None:
        """Keep a snapshot unless a newer one was received before it."""
        if self.snapshot is None or snapshot.sequence > self.snapshot.sequence:
            self.snapshot, self.snapshot_received, self.step, self.refused = snapshot, now, None, None
            self.clock.receive(snapshot, now, wall_ns)

    def newest_of(self, started_ns: int) -> Snapshot | None:
        """The newest snapshot of the process that began then; None = none, or it is not kept."""
        if started_ns == self.identity.started_ns:
            return self.snapshot or self.lives.returned
        return self.lives.newest_of(started_ns)

    def depart(self, now: float, *, acknowledged: bool) -> None:
        """It detached, or an operator dismissed it."""
        if not self.departed:
            self.departed, self.departed_at = True, now
        self.acknowledged = acknowledged

    def acknowledge(self, later: Mapping[str, int] | None) -> Acknowledge:
        """What an operator can have seen of it; later: rows not seen, by incident; None = all was seen."""
        self.inherited = ()
        self.rows.acknowledge(later or {})
        snapshot = self.snapshot
        if snapshot is None:
            return Acknowledge(violations=0, faults=0, events_dropped=0, messages_dropped=0)
        seen = violations_of(snapshot) if later is None else self._seen(snapshot)
        self.acknowledged_violations = max(self.acknowledged_violations, seen)
        return Acknowledge(
            violations=seen,
            faults=sum(snapshot.observer_faults.values()),
            events_dropped=snapshot.violation_events_dropped,
            messages_dropped=snapshot.messages_dropped,
        )

    def acknowledge_incident(self, incident: str) -> Acknowledge:
        """The violations of one incident were seen, and nothing else."""
        self.inherited = tuple(ended for ended in self.inherited if ended.acknowledge(incident))
        self.rows.acknowledge_incident(incident)
        seen = self._seen(self.snapshot)
        self.acknowledged_violations = max(self.acknowledged_violations, seen)
        return Acknowledge(violations=seen, violations_only=True)

    def undo(self, incident: str) -> Acknowledge:
        """The violations of one incident count as not seen; those of processes that ended stay seen."""
        self.rows.undo(incident)
        self.acknowledged_violations = self._seen(self.snapshot)
        self.acknowledged = False
        return Acknowledge(violations=self.acknowledged_violations, violations_only=True, undo=True)

    def _seen(self, snapshot: Snapshot | None) -> int:
        # What was dropped belongs to no incident: it was seen with those whose rows were.
        if snapshot is None:
            return 0
        rows = self.rows.received - self.rows.unseen.total()
        return max(0, min(violations_of(snapshot), rows + snapshot.violation_events_dropped))

    def note_step(
        self, message: StepUnderWay, now: float, stale_seconds: float, limit_seconds: float
    ) -> None:
        """A step is under way: until `stale_seconds` from now no snapshot is due, if it may last so long."""
        self.step, self.step_received = message, now
        self.step_excuses_until = now + min(stale_seconds, limit_seconds - message.seconds)

    def step_seconds(self, now: float, stale_seconds: float) -> float | None:
        """How long the step under way has lasted; None = none is known to be."""
        if self.step is None or now - self.step_received > stale_seconds:
            return None
        return self.step.seconds + max(0.0, now - self.step_received)

    def is_silent(self, now: float, stale_seconds: float) -> bool:
        """Whether it departed, or sent no snapshot for too long while no step was under way."""
        age = self.snapshot_age(now)
        silent = now - self.last_message if age is None else age
        return self.departed or (silent > stale_seconds and now > self.step_excuses_until)

    def snapshot_age(self, now: float) -> float | None:
        """Seconds since the latest snapshot was taken; None = none yet."""
        if self.snapshot is None:
            return None
        return self.clock.delay + max(0.0, now - self.snapshot_received)

    def verdict(self, now: float, stale_seconds: float) -> tuple[State, tuple[str, ...]]:
        """State and reasons, with what processes before this one had found."""
        state, reasons = self._verdict(now, stale_seconds)
        ended = tuple(
            f"{counted(found.violations, 'violation')} of process {found.pid}, which has ended, "
            "not acknowledged"
            for found in self.inherited
        )
        return (State.VIOLATED, (*ended, *reasons)) if ended else (state, reasons)

    def _verdict(self, now: float, stale_seconds: float) -> tuple[State, tuple[str, ...]]:
        """Those the rank reported, unless it departed, fell silent or has a duplicate."""
        snapshot, age = self.snapshot, self.snapshot_age(now)
        violated = snapshot is not None and snapshot.state is State.VIOLATED
        reasons = list(snapshot.state_reasons) if snapshot else []
        if self.refused is not None:
            reasons.insert(0, f"a message was refused: {self.refused}")
        if self.departed:
            unacknowledged = violated and not self.acknowledged
            return (State.VIOLATED, tuple(reasons)) if unacknowledged else (State.OFF, ("detached",))
        if self.duplicate is not None and now - self.duplicate_last_message <= stale_seconds:
            pid = self.duplicate.pid
            blind = f"process {pid} reports as the same rank; give each engine its own instance name"
        elif age is not None and age > stale_seconds and now > self.step_excuses_until:
            blind = f"latest snapshot is {age:.1f} s old"
            if (lasted := self.step_seconds(now, stale_seconds)) is not None:
                blind += f"; the engine's step has lasted {lasted:.0f} s"
        elif age is None and now - self.last_message > stale_seconds:
            blind = "attached, but never sent a snapshot"
        elif snapshot is None:
            starting = now - self.began <= START_SECONDS
            state = State.OFF if starting and self.refused is None else State.DEGRADED
            return state, ("attached; waiting for its first snapshot", *reasons)
        else:
            doubted = [State.DEGRADED] if self.refused is not None else []
            return worst([snapshot.state, *doubted]), tuple(reasons)
        # A silent rank keeps the violations it reported.
        return State.VIOLATED if violated else State.BLIND, (blind, *reasons)

    def view(self, now: float, stale_seconds: float) -> RankView:
        """An immutable copy for readers outside the hub."""
        state, reasons = self.verdict(now, stale_seconds)
        return RankView(
            identity=self.identity,
            hello=self.hello,
            snapshot=self.snapshot,
            totals=self.totals,
            snapshot_age=self.snapshot_age(now),
            silent_seconds=max(0.0, now - self.last_message),
            clock_skew_seconds=self.clock.skew,
            step_seconds=self.step_seconds(now, stale_seconds),
            departed=self.departed,
            restarts=self.restarts,
            state=state,
            reasons=reasons,
        )


def redetections_of(snapshot: Snapshot) -> int:
    """All redetections that a snapshot counts."""
    return sum(sum(group.redetections.values()) for group in snapshot.groups.values())


def violations_of(snapshot: Snapshot) -> int:
    """All violations that a snapshot counts."""
    groups = snapshot.groups.values()
    return sum(sum(found.values()) for group in groups for found in group.violations.values())
