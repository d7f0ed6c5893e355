"""The table of ranks: admission, restarts and duplicates, silence, pings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from canary_obs.config import ServiceConfig
from canary_obs.hub.clocks import SnapshotClock
from canary_obs.hub.commands import NoEngine
from canary_obs.hub.rank_selection import EVERY_RANK, RankSelection
from canary_obs.hub.ranks import Rank, RankView, rank_name
from canary_obs.records import EngineMessage, Identity, Ping, RankKey, Snapshot
from canary_obs.transport.sink import Reply
from canary_obs.vocabulary import State

PING_SECONDS = 0.5
RANKS_KEPT = 1024
MISSING_SECONDS = 5.0  # ranks of one engine attach, and detach, within this time of one another


class RankTable:
    """Ranks by key. Not thread-safe: the hub holds its lock around every call. Times are the hub's clock."""

    def __init__(
        self,
        config: ServiceConfig,
        on_restart: Callable[[RankKey, int], None],
        boot_id: str | None,
    ) -> None:
        """on_restart: called with the key and the new started_ns when another process continues a rank.

        boot_id: of this host; None = unknown.
        """
        self._stale_seconds, self._boot_id = config.snapshot_stale_seconds, boot_id
        self._kept_seconds = config.rank_kept_seconds
        self._on_restart = on_restart
        self._ranks: dict[RankKey, Rank] = {}
        self.expired = 0  # ranks forgotten, long after they left or fell silent
        self.refused = 0  # messages of replaced processes, and of new ranks beyond RANKS_KEPT live ones

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks.values())

    def find(self, key: RankKey) -> Rank | None:
        """One rank, if it is known."""
        return self._ranks.get(key)

    def newest_of(self, sender: Identity) -> Snapshot | None:
        """The newest snapshot of this very process; None = none is known."""
        rank = self._ranks.get(sender.key)
        return None if rank is None else rank.newest_of(sender.started_ns)

    def note_refusal(self, sender: Identity, why: str) -> None:
        """A message of this process was refused: its rank, if there is one, shows why."""
        rank = self._ranks.get(sender.key)
        if rank is not None and rank.identity.started_ns == sender.started_ns:
            rank.refused = why

    def admit(self, message: EngineMessage, reply: Reply, now: float) -> Rank | None:
        """The sender's rank, new or known; None = refused: replaced by a newer process, or no room."""
        identity = message.identity
        rank = self._ranks.get(identity.key)
        if rank is None:
            if not self._make_room(now):
                self.refused += 1
                return None
            clock = SnapshotClock(self._boot_id)
            rank = self._ranks[identity.key] = Rank(identity, reply, now, clock, began=now)
        elif identity.started_ns != rank.identity.started_ns:
            # After a clock was set back, a restarted engine looks older: admit it once the other is silent.
            if identity.started_ns < rank.identity.started_ns and not self.is_silent(rank, now):
                self._refuse(rank, message, now)
                return None
            rank.restart(identity, now)
            self._on_restart(identity.key, identity.started_ns)
        rank.reply, rank.last_message = reply, now
        return rank

    def _refuse(self, rank: Rank, message: EngineMessage, now: float) -> None:
        self.refused += 1
        # Only a snapshot taken after the newer process started shows that the older one still runs.
        if isinstance(message, Snapshot) and message.time_ns > rank.identity.started_ns:
            rank.duplicate, rank.duplicate_last_message = message.identity, now

    def _make_room(self, now: float) -> bool:
        """Drop a rank, detached before silent, heard longest ago; False = the table is full of live ranks."""
        if len(self._ranks) < RANKS_KEPT:
            return True
        silent = [key for key, rank in self._ranks.items() if self.is_silent(rank, now)]
        if not silent:
            return False
        del self._ranks[
            min(silent, key=lambda key: (not self._ranks[key].departed, self._ranks[key].last_message))
        ]
        return True

    def expire(self, now: float) -> list[RankKey]:
        """Forget ranks that left or fell silent long ago, but for those with unacknowledged violations."""
        gone = [key for key, rank in self._ranks.items() if self._is_expired(rank, now)]
        for key in gone:
            del self._ranks[key]
        self.expired += len(gone)
        return gone

    def _is_expired(self, rank: Rank, now: float) -> bool:
        if now - rank.last_message < self._kept_seconds or not self.is_silent(rank, now):
            return False
        return rank.verdict(now, self._stale_seconds)[0] is not State.VIOLATED

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

    def live(self, now: float, selection: RankSelection = EVERY_RANK) -> list[Rank]:
        """Selected ranks that can receive a command. Raises NoEngine, or UnknownRank."""
        selected = selection.of(self._ranks)
        live = [rank for key in selected if not self.is_silent(rank := self._ranks[key], now)]
        if not live:
            _, reasons = self.verdicts(now)
            raise NoEngine(f"no engine can answer: {'; '.join(reasons) or 'no engine is attached'}")
        return live

    def unreachable(self, now: float, selection: RankSelection) -> dict[RankKey, str]:
        """Selected ranks that no command can reach, though their engine should have them; why."""
        found = {
            key: "the rank is silent" for key in selection.of(self._ranks)
            if self.is_silent(self._ranks[key], now)
            and (not self._ranks[key].departed or key[2] in selection.ranks)
        }  # fmt: skip
        for (engine, instance), numbers in self.missing(now).items():
            for number in numbers:
                if selection.matches((engine, instance, number)):
                    found[engine, instance, number] = "no word of this rank, which its engine has"
        return found

    def views(self, now: float) -> tuple[RankView, ...]:
        """Every rank, sorted by key."""
        return tuple(self._ranks[key].view(now, self._stale_seconds) for key in sorted(self._ranks))

    def verdicts(self, now: float) -> tuple[list[State], list[str]]:
        """States of all ranks that are not OFF, and their reasons, each prefixed with the rank's name.

        Where every rank is OFF: no states, and why those are off that have not left.
        """
        states: list[State] = []
        reasons: list[str] = []
        off: list[str] = []
        for key in sorted(self._ranks):
            rank = self._ranks[key]
            state, rank_reasons = rank.verdict(now, self._stale_seconds)
            named = [f"{rank_name(key)}: {reason}" for reason in rank_reasons]
            if state is not State.OFF:
                states.append(state)
                reasons += named
            elif not rank.departed:
                off += named
        for (engine, instance), missing in self.missing(now).items():
            if missing:
                states.append(State.BLIND)
                listed = ", ".join(map(str, missing))
                reasons.append(f"{engine}/{instance}: no word of ranks {listed}, which this engine has")
        return states, reasons if states else off

    def missing(self, now: float) -> dict[tuple[str, str], tuple[int, ...]]:
        """By (engine, instance) that is attached: ranks that its other ranks expect here, and are not."""
        present: dict[tuple[str, str], list[Rank]] = {}
        for rank in self:
            if not rank.departed:
                present.setdefault(rank.identity.key[:2], []).append(rank)
        return {key: tuple(self._missing_of(key, ranks, now)) for key, ranks in sorted(present.items())}

    def _missing_of(self, key: tuple[str, str], present: list[Rank], now: float) -> Iterator[int]:
        expected = {number for rank in present if rank.hello for number in rank.hello.expected_ranks}
        began = min(rank.began for rank in present)
        for number in sorted(expected - {rank.identity.rank for rank in present}):
            gone = self._ranks.get((*key, number))
            since = began if gone is None else max(began, gone.departed_at)
            if now - since > MISSING_SECONDS:
                yield number
