"""Which ranks the service knows: who is admitted, who is a duplicate, who fell silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from canary_obs.config import ServiceConfig
from canary_obs.hub.commands import NoEngine
from canary_obs.hub.ranks import Rank, RankView, label
from canary_obs.hub.sweeps import RankKey
from canary_obs.records import EngineMessage, Ping, Snapshot
from canary_obs.transport.sink import Reply
from canary_obs.vocabulary import State

PING_SECONDS = 0.5
RANKS_KEPT = 1024


class RankTable:
    """Ranks by key. Not thread-safe: the hub holds its lock around every call. Times are the hub's clock."""

    def __init__(self, config: ServiceConfig, restarted: Callable[[RankKey, int], None]) -> None:
        """restarted: called with the key and started_ns of a rank that another process continues."""
        self._stale_seconds = config.snapshot_stale_seconds
        self._restarted = restarted
        self._ranks: dict[RankKey, Rank] = {}
        self.refused = 0  # messages of processes that were replaced

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks.values())

    def find(self, key: RankKey) -> Rank | None:
        """One rank, if it is known."""
        return self._ranks.get(key)

    def admit(self, message: EngineMessage, reply: Reply, now: float) -> Rank | None:
        """The sender's rank, new or known; None = refused, as a newer process holds the rank."""
        identity = message.identity
        rank = self._ranks.get(identity.key)
        if rank is None:
            self._evict()
            rank = self._ranks[identity.key] = Rank(identity, reply, now)
        elif identity.started_ns != rank.identity.started_ns:
            # A clock set back can make a successor look older; then its predecessor's silence decides.
            if identity.started_ns < rank.identity.started_ns and not self.is_silent(rank, now):
                self._refuse(rank, message, now)
                return None
            rank.restart(identity)
            self._restarted(identity.key, identity.started_ns)
        rank.reply, rank.heard = reply, now
        return rank

    def _refuse(self, rank: Rank, message: EngineMessage, now: float) -> None:
        self.refused += 1
        # A message queued before its successor started does not show that the process still runs.
        if isinstance(message, Snapshot) and message.time_ns > rank.identity.started_ns:
            rank.duplicate, rank.duplicate_heard = message.identity, now

    def _evict(self) -> None:
        while len(self._ranks) >= RANKS_KEPT:
            del self._ranks[min(self._ranks, key=lambda key: self._ranks[key].heard)]

    def is_silent(self, rank: Rank, now: float) -> bool:
        """Whether a rank detached, or sent no snapshot for too long."""
        age = rank.snapshot_age(now)
        silent = now - rank.heard if age is None else age
        return rank.departed or silent > self._stale_seconds

    def ping_due(self, now: float) -> None:
        """Ping every attached rank whose last ping is PING_SECONDS old."""
        for rank in self:
            if not rank.departed and now - rank.pinged >= PING_SECONDS:
                self.ping(rank, now)

    def ping(self, rank: Rank, now: float) -> None:
        """Send a ping; asks for a Hello where none was received."""
        rank.pinged = now
        rank.reply(Ping(want_hello=rank.hello is None))

    def live(self, now: float) -> list[Rank]:
        """Ranks that can take a command. Raises NoEngine."""
        live = [rank for rank in self if not self.is_silent(rank, now)]
        if not live:
            _, reasons = self.verdicts(now)
            raise NoEngine(f"no engine can answer: {'; '.join(reasons) or 'no engine is attached'}")
        return live

    def views(self, now: float) -> tuple[RankView, ...]:
        """Every rank, sorted by key."""
        return tuple(self._ranks[key].view(now, self._stale_seconds) for key in sorted(self._ranks))

    def verdicts(self, now: float) -> tuple[list[State], list[str]]:
        """States of all ranks that are not OFF, and their reasons, each with the rank's label."""
        states: list[State] = []
        reasons: list[str] = []
        for key in sorted(self._ranks):
            state, why = self._ranks[key].verdict(now, self._stale_seconds)
            if state is not State.OFF:
                states.append(state)
                reasons += [f"{label(key)}: {reason}" for reason in why]
        return states, reasons
