"""One rank as the service knows it: its latest messages, its earlier lives, and how to reach it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from canary_obs.hub.counters import carried_over
from canary_obs.records import Hello, Identity, Snapshot
from canary_obs.transport.sink import Reply
from canary_obs.vocabulary import State


def label(key: tuple[str, str, int]) -> str:
    """A rank in words: engine/instance/rank."""
    return "/".join(map(str, key))


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """A rank at one moment. `totals` has the counters of earlier lives added; ages in seconds."""

    identity: Identity
    hello: Hello | None
    snapshot: Snapshot | None
    totals: Snapshot | None
    snapshot_age: float | None  # since the snapshot was taken; None = none yet
    silent_seconds: float  # since the rank's last message
    departed: bool  # said goodbye, or was dismissed by an operator
    restarts: int
    state: State
    reasons: tuple[str, ...]


@dataclass(slots=True)
class Rank:
    """The hub's entry for one rank; only the hub touches it, under its lock."""

    identity: Identity
    reply: Reply
    heard: float  # hub clock
    hello: Hello | None = None
    snapshot: Snapshot | None = None
    base: Snapshot | None = None  # totals of earlier lives
    snapshot_delay: float = 0.0  # between taking and arriving
    snapshot_heard: float = 0.0
    departed: bool = False
    acknowledged: bool = False  # an operator has seen how it left
    restarts: int = 0
    pinged: float = float("-inf")
    duplicate: Identity | None = None  # an older process that still speaks under this rank's name
    duplicate_heard: float = float("-inf")

    @property
    def totals(self) -> Snapshot | None:
        """Counters over all lives; what is known of earlier ones until this life reports."""
        return carried_over(self.snapshot, self.base) if self.snapshot else self.base

    def restart(self, identity: Identity) -> None:
        """Another process speaks under this name: keep its predecessor's totals."""
        self.base = self.totals
        self.snapshot, self.hello = None, None
        self.identity, self.departed = identity, False
        self.restarts += 1

    def update(self, snapshot: Snapshot, now: float, wall_ns: int) -> None:
        """Keep a snapshot unless it is older than the one at hand."""
        if self.snapshot is None or snapshot.sequence > self.snapshot.sequence:
            self.snapshot, self.snapshot_heard = snapshot, now
            self.snapshot_delay = max(0.0, (wall_ns - snapshot.time_ns) / 1e9)

    def snapshot_age(self, now: float) -> float | None:
        """Seconds since the latest snapshot was taken."""
        return None if self.snapshot is None else self.snapshot_delay + max(0.0, now - self.snapshot_heard)

    def verdict(self, now: float, stale_seconds: float) -> tuple[State, tuple[str, ...]]:
        """The rank's own state, corrected by what the service sees of it."""
        snapshot, age = self.snapshot, self.snapshot_age(now)
        violated = snapshot is not None and snapshot.state is State.VIOLATED
        reasons = list(snapshot.state_reasons) if snapshot else []
        if self.departed:
            open_damage = violated and not self.acknowledged
            return (State.VIOLATED, tuple(reasons)) if open_damage else (State.OFF, ("detached",))
        if self.duplicate is not None and now - self.duplicate_heard <= stale_seconds:
            pid = self.duplicate.pid
            blind = f"process {pid} reports as the same rank; give each engine its own instance name"
        elif age is not None and age > stale_seconds:
            blind = f"latest snapshot is {age:.1f} s old"
        elif age is None and now - self.heard > stale_seconds:
            blind = "attached, but never sent a snapshot"
        elif snapshot is None:
            return State.DEGRADED, ("attached; waiting for its first snapshot",)
        else:
            return snapshot.state, tuple(reasons)
        # Silence does not undo damage already reported.
        return State.VIOLATED if violated else State.BLIND, (blind, *reasons)

    def view(self, now: float, stale_seconds: float) -> RankView:
        """What others may see."""
        state, reasons = self.verdict(now, stale_seconds)
        return RankView(
            identity=self.identity,
            hello=self.hello,
            snapshot=self.snapshot,
            totals=self.totals,
            snapshot_age=self.snapshot_age(now),
            silent_seconds=max(0.0, now - self.heard),
            departed=self.departed,
            restarts=self.restarts,
            state=state,
            reasons=reasons,
        )
