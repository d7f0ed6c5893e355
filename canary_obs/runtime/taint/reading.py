"""Follows who held which blocks, bounded, and finds who read a damaged one, also by way of other requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from canary_obs.engine_api.requests import BlockTable, GrownBlocks, RequestChange
from canary_obs.runtime.taint.held_blocks import HeldBlocks, Ints
from canary_obs.runtime.taint.lives import RUNNING, Lives
from canary_obs.runtime.taint.stored_blocks import COPIES_KEPT, StoredBlocks, as_blocks
from canary_obs.slot_facts import request_name

ROWS_KEPT = 1 << 16  # of one numbering, or twice its blocks: to forget half takes 1 ms
LIVES_KEPT = 1 << 15


@dataclass(frozen=True, slots=True)
class Reading:
    """A life that read damage, from forward `step` on; `derived`: KV computed from it."""

    life: int
    step: int
    derived: bool


@dataclass(frozen=True, slots=True)
class Affected:
    """Lives that read damage, and the blocks that they filled from then on, by numbering."""

    readings: tuple[Reading, ...]
    blocks: Mapping[str, Ints]


class Readers:
    """What is forgotten is known: `forgotten_until` is the last forward of any life that is."""

    def __init__(
        self, tables: Mapping[str, BlockTable], rows_kept: int = ROWS_KEPT, lives_kept: int = LIVES_KEPT
    ) -> None:
        """`tables` by group name; groups may share one."""
        self.tokens = {table.name: table.block_tokens for table in tables.values()}
        self.held = {name: HeldBlocks() for name in self.tokens}
        kept = max(COPIES_KEPT, rows_kept)
        self.stored = {name: StoredBlocks(held, kept) for name, held in self.held.items()}
        self.lives = Lives()
        self._rows_kept, self._lives_kept = rows_kept, lives_kept
        self._forgotten_until = -1
        self._affected: tuple[tuple[Sequence[Reading], list[int]], Affected] | None = None  # asked for last
        np.setdiff1d(np.empty(0), np.empty(0))  # what it imports takes 40 ms: now, not in a step
        self._forgotten: set[str] = set()  # requests that run, and are not followed

    def forgotten_until(self, step: int) -> int:
        """Forwards up to this one may have been those of lives that are not known; -1 = none."""
        if self._forgotten:
            self._forgotten_until = max(self._forgotten_until, step)
        return max(self._forgotten_until, *(stored.forgotten_until for stored in self.stored.values()), -1)

    def miss(self, until: int) -> None:
        """Forwards up to this one were not all shown."""
        self._forgotten_until = max(self._forgotten_until, until)

    # What happens.

    def begin(self, name: str, change: RequestChange, step: int) -> int | None:
        """The life of a request that begins or goes on; None = it is not followed."""
        if change.begins:
            self.end(name, step - 1, None)
            return self.lives.begin(name, change.prompt, change.emitted)
        return self.life_of(name)

    def life_of(self, name: str) -> int | None:
        """The life of a request that runs; None = it is not followed."""
        life = self.lives.running.get(name)
        if life is None and (life := self.lives.running.get(request_name(name))) is None:
            self._forgotten.add(request_name(name))
        return life

    def _lives_of(self, grown: GrownBlocks) -> tuple[list[int], GrownBlocks]:
        """The lives of requests that get a block more, and the columns of those that are followed."""
        try:
            return [self.lives.running[name] for name in grown.requests], grown
        except KeyError:  # a long name, or a request that is not followed
            found = list(map(self.life_of, grown.requests))
            known = [life is not None for life in found]
            columns = (list(compress(column, known)) for column in grown[1:])
            kept = GrownBlocks(list(compress(grown.requests, known)), *columns)
            return [life for life in found if life is not None], kept

    def add(self, life: int, change: RequestChange, step: int) -> None:
        """A life reads more blocks from forward `step` on."""
        for name, added in change.added.items():
            self.held[name].add(life, added, step, change.computed)
            self.stored[name].fill(added.blocks[added.joined :], step)

    def add_one_each(self, table: str, grown: GrownBlocks, step: int) -> tuple[list[int], GrownBlocks]:
        """Requests fill a block more each from forward `step` on; returns those that are followed."""
        lives, grown = self._lives_of(grown)
        if lives:
            self.held[table].add_one_each(lives, grown, step)
            self.stored[table].fill(as_blocks(grown.blocks), step)
        return lives, grown

    def end(self, request: str, step: int, emitted: int | None) -> int | None:
        """A request ended, or was preempted; forward `step` was its last. Returns its life."""
        if request in self._forgotten:
            self._forgotten.discard(request)
            self._forgotten_until = max(self._forgotten_until, step)
        return self.lives.end(request, step, emitted)

    @property
    def full(self) -> bool:
        """Whether `forget` is due."""
        return len(self.lives) > self._lives_kept or any(
            held.count > self._rows_kept for held in self.held.values()
        )

    def forget(self, pinned: Iterable[int], step: int) -> Ints:
        """Forget the half of the lives that ended first, without the pinned; returns who is kept."""
        last = self.lives.last[: len(self.lives)]
        ended = np.setdiff1d(np.flatnonzero(last != RUNNING), np.fromiter(pinned, dtype=np.int64))
        if ended.size:
            gone = ended[np.argsort(last[ended], kind="stable")][: -(-ended.size // 2)]
            self._forgotten_until = max(self._forgotten_until, int(last[gone].max()))
        else:  # those that run hold more blocks than are kept
            gone = np.setdiff1d(np.arange(len(self.lives)), np.fromiter(pinned, dtype=np.int64))
            gone_ones = set(gone.tolist())
            names = [name for name, life in self.lives.running.items() if life in gone_ones]
            for name in names:
                del self.lives.running[name]
            self._forgotten.update(names)
            self._forgotten_until = max(self._forgotten_until, step)
        kept = np.setdiff1d(np.arange(len(self.lives)), gone)
        self._affected = None
        self.lives.keep(kept)
        for held in self.held.values():
            held.keep(kept)
        return kept

    # Who read it.

    def reached(self, first: Sequence[Reading]) -> Affected:
        """These readings, and those of whoever joined blocks that a reader filled after them."""
        counts = [held.count for held in self.held.values()]
        asked = first, counts + [stored.loads for stored in self.stored.values()]
        if self._affected is None or self._affected[0] != asked:  # blocks of a request share readers
            self._affected = asked, self._reached(first)
        return self._affected[1]

    def _reached(self, first: Sequence[Reading]) -> Affected:
        found: dict[int, Reading] = {}
        filled: dict[str, list[Ints]] = {name: [] for name in self.held}
        waiting = [*first]
        while waiting:
            fresh: dict[int, Reading] = {}
            for reading in waiting:
                known = found.get(reading.life)
                if known is None or known.step > reading.step:
                    found[reading.life] = fresh[reading.life] = reading
            waiting = []
            lives, computed = self.computed(list(fresh.values()))
            for name, held in self.held.items():
                blocks, since = held.filled_since(lives, computed // self.tokens[name])
                if blocks.size:
                    filled[name].append(self._still_there(name, blocks, since))
                    waiting += [Reading(life, step, True) for life, step in held.joined_later(blocks, since)]
                    joined, there = self.stored[name].joined_later(blocks, since)
                    waiting += [Reading(life, step, True) for life, step in joined]
                    filled[name].append(as_blocks(there))
        return Affected(
            tuple(found.values()),
            {name: np.concatenate([*blocks, np.empty(0, np.int64)]) for name, blocks in filled.items()},
        )

    def first_derived(self, name: str, reading: Reading) -> int:
        """The first block in the list of a life that it may have filled since it read damage."""
        return int(self.computed([reading])[1][0]) // self.tokens[name]

    def _still_there(self, name: str, blocks: Ints, since: Ints) -> Ints:
        still = self.held[name].latest_fill(blocks) == since
        return self.stored[name].not_loaded_since(blocks[still], since[still])

    def fill_whole(self, readings: Sequence[Reading]) -> bool:
        """Whether one of these lives may have filled a whole block since it read damage."""
        lives, computed = self.computed(readings)
        ends = np.array([self.lives.extent(life) for life in lives.tolist()], dtype=np.int64)
        return any(
            (ends // tokens > computed // tokens).any()
            or self.held[name].filled_since(lives, computed // tokens + 1)[0].size > 0
            for name, tokens in self.tokens.items()
        )

    def life_at(self, request: str, step: int) -> int | None:
        """The life of a request in forward `step`."""
        later = np.flatnonzero(self.lives.last[: len(self.lives)] >= step).tolist()
        return next((life for life in later if self.lives.names[life] == request), None)

    def computed_at(self, life: int, step: int) -> int:
        """Tokens that a life had at least, before forward `step`."""
        return max(held.computed_at(life, step) for held in self.held.values())

    def computed(self, readings: Sequence[Reading]) -> tuple[Ints, Ints]:
        """The lives of these readings, and the tokens that each had at least before it read damage."""
        lives = np.array([one.life for one in readings], dtype=np.int64)
        steps = np.array([one.step for one in readings], dtype=np.int64)
        found = np.zeros(lives.size, dtype=np.int64)
        for held in self.held.values():
            np.maximum(found, held.computed(lives, steps), out=found)
        return lives, found
