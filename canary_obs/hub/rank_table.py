"""The table of ranks: admission, restarts and duplicates, silence, pings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from canary_obs.config import ServiceConfig
from canary_obs.hub.commands import NoEngine
from canary_obs.hub.ranks import Rank, RankView, rank_name
from canary_obs.records import EngineMessage, Ping, RankKey, Snapshot
from canary_obs.transport.sink import Reply
from canary_obs.vocabulary import State

PING_SECONDS = 0.5
RANKS_KEPT = 1024


class RankTable:
    """Ranks by key. Not thread-safe: the hub holds its lock around every call. Times are the hub's clock."""

    def __init__(self, config: ServiceConfig, on_restart: Callable[[RankKey, int], None]) -> None:
        """on_restart: called with the key and the new started_ns when another process continues a rank."""
        self._stale_seconds = config.snapshot_stale_seconds
        self._on_restart = on_restart
        self._ranks: dict[RankKey, Rank] = {}
        self.refused = 0  # messages of replaced processes

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks.values())

    def find(self, key: RankKey) -> Rank | None:
        """One rank, if it is known."""
        return self._ranks.get(key)

    def admit(self, message: EngineMessage, reply: Reply, now: float) -> Rank | None:
        """The sender's rank, new or known; None = refused, because a newer process reports as this rank."""
        identity = message.identity
        rank = self._ranks.get(identity.key)
        if rank is None:
            self._evict()
            rank = self._ranks[identity.key] = Rank(identity, reply, now)
        elif identity.started_ns != rank.identity.started_ns:
            # After a clock was set back, a restarted engine looks older: admit it once the other is silent.
            if identity.started_ns < rank.identity.started_ns and not self.is_silent(rank, now):
                self._refuse(rank, message, now)
                return None
            rank.restart(identity)
            self._on_restart(identity.key, identity.started_ns)
        rank.reply, rank.last_message = reply, now
        return rank

    def _refuse(self, rank: Rank, message: EngineMessage, now: float) -> None:
        self.refused += 1
        # Only a snapshot taken after the newer process started shows that the older one still runs.
        if isinstance(message, Snapshot) and message.time_ns > rank.identity.started_ns:
            rank.duplicate, rank.duplicate_last_message = message.identity, now

    def _evict(self) -> None:
        while len(self._ranks) >= RANKS_KEPT:
            del self._ranks[min(self._ranks, key=lambda key: self._ranks[key].last_message)]

    def is_silent(self, rank: Rank, now: float) -> bool:
        """Whether a rank departed, or sent no snapshot for too long."""
        return rank.is_silent(now, self._stale_seconds)

    def send_due_pings(self, now: float) -> None:
        """Ping every attached rank whose last ping is at least PING_SECONDS old."""
        for rank in self:
            if not rank.departed and now - rank.last_ping >= PING_SECONDS:
                self.ping(rank, now)

    def ping(self, rank: Rank, now: float) -> None:
        """Send a ping, which asks for a Hello if none was received."""
        rank.last_ping = now
        rank.reply(Ping(want_hello=rank.hello is None))

    def live(self, now: float) -> list[Rank]:
        """Ranks that can receive a command. Raises NoEngine."""
        live = [rank for rank in self if not self.is_silent(rank, now)]
        if not live:
            _, reasons = self.verdicts(now)
            raise NoEngine(f"no engine can answer: {'; '.join(reasons) or 'no engine is attached'}")
        return live

    def views(self, now: float) -> tuple[RankView, ...]:
        """Every rank, sorted by key."""
        return tuple(self._ranks[key].view(now, self._stale_seconds) for key in sorted(self._ranks))

    def verdicts(self, now: float) -> tuple[list[State], list[str]]:
        """States of all ranks that are not OFF, and their reasons, each prefixed with the rank's name."""
        states: list[State] = []
        reasons: list[str] = []
        for key in sorted(self._ranks):
            state, rank_reasons = self._ranks[key].verdict(now, self._stale_seconds)
            if state is not State.OFF:
                states.append(state)
                reasons += [f"{rank_name(key)}: {reason}" for reason in rank_reasons]
        return states, reasons
