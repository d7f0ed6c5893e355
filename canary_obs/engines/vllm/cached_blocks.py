"""The prefix cache as a worker knows it, from the events of the scheduler's block pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from canary_obs.engine_api.adapter import PrefixCache
from canary_obs.engine_api.views import CachedCount, CachedSlots
from canary_obs.engine_api.walks import CachedWalk
from canary_obs.engines.vllm.cache_count import BlockCounts
from canary_obs.errors import UnsupportedEngine

_NEVER = np.iinfo(np.int64).max


class Published(NamedTuple):
    """The pool cached a block: the request's `number`-th one, with `filled` valid tokens."""

    group: int
    block: int
    number: int
    previous: int  # the request's block before it; -1 = none or null
    filled: int


class PublishedRun(NamedTuple):
    """The pool cached consecutive blocks of a request; one event, as a long prompt has hundreds of blocks."""

    group: int
    blocks: tuple[int, ...]  # at least two
    number: int  # of the first
    previous: int  # before the first
    filled: int  # tokens valid in each

    def single(self, place: int) -> Published:
        """The event of `blocks[place]` alone."""
        previous = self.blocks[place - 1] if place else self.previous
        return Published(self.group, self.blocks[place], self.number + place, previous, self.filled)


class Partial(NamedTuple):
    """The pool cached the first `filled` tokens of a block; it may hold more of the block already."""

    group: int
    block: int
    number: int
    filled: int


class Loaded(NamedTuple):
    """A KV connector fills consecutive blocks of a request with bytes from outside; one event per group.

    It was asked for the request's tokens from `start` up to `stop`, and may write the blocks' others.
    """

    group: int
    blocks: tuple[int, ...]  # 0 = the null block: out of a window, never loaded
    number: int  # of the first
    start: int
    stop: int
    request: str


class LoadTokens(NamedTuple):
    """Tokens of a request whose `Loaded` events follow: int32, from its first to the last that is loaded."""

    request: str
    tokens: bytes


class EventsLost(NamedTuple):
    """So many events before this one were dropped: the worker no longer knows what is cached."""

    events: int


# Events are in order. An int is a block that was evicted; None = the whole cache was reset.
BlockEvent = Published | PublishedRun | Partial | LoadTokens | Loaded | EventsLost | int | None


_SCANNED = 1 << 15  # blocks that are looked at in one go: few may be cached
_Blocks = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(slots=True)
class _GroupBlocks:
    """The cached blocks of one group. Clocks count events; `since` is _NEVER for blocks not cached."""

    num_blocks: int
    block_size: int
    since: np.ndarray[tuple[int], np.dtype[np.int64]] = field(init=False)  # clock when it was cached
    columns: np.ndarray[tuple[int, int], np.dtype[np.int64]] = field(init=False)
    filled: np.ndarray[tuple[int], np.dtype[np.int32]] = field(init=False)  # tokens in the block
    total: int = 0  # slots of all cached blocks, counted as they come and go
    # `since` and `filled` when the last walk began.
    walked: tuple[_Blocks, np.ndarray[tuple[int], np.dtype[np.int32]]] = field(init=False)
    mark: int = -1  # clock of the last call of `cached` or `walk`

    def __post_init__(self) -> None:
        self.since = np.full(self.num_blocks, _NEVER, dtype=np.int64)
        # number in the request, previous block, that block's `since`
        self.columns = np.zeros((self.num_blocks, 3), dtype=np.int64)
        self.filled = np.zeros(self.num_blocks, dtype=np.int32)
        self.walked = np.full_like(self.since, _NEVER), np.zeros_like(self.filled)

    def evict(self, blocks: int | slice | _Blocks) -> None:
        """These blocks are not cached from now on."""
        if isinstance(blocks, int):
            if self.since[blocks] != _NEVER:
                self.total -= int(self.filled[blocks])
        else:
            self.total -= int(self.filled[blocks].sum(where=self.since[blocks] != _NEVER))
        self.since[blocks] = _NEVER

    def slots(self, held: _Blocks, filled: np.ndarray[tuple[int], np.dtype[np.int32]]) -> CachedSlots:
        """The slots of these blocks, of each as many as are given; links to evicted blocks are left out."""
        order, before, since = self.columns[held].T
        offsets = np.arange(self.block_size)
        valid = offsets < filled[:, None]
        slots = held[:, None] * self.block_size + offsets
        previous = slots - 1
        if held.size:
            intact = (before >= 0) & (since != _NEVER) & (self.since[before] == since)
            previous[:, 0] = np.where(intact, before * self.block_size + self.block_size - 1, -1)
        positions = order[:, None] * self.block_size + offsets
        columns = (torch.from_numpy(column[valid]) for column in (slots, positions, previous))
        return CachedSlots(**dict(zip(("slots", "positions", "previous"), columns, strict=True)))


class _BlockWalk(CachedWalk):
    """Copies two numbers per block; slots, many times as many, are computed as they are taken.

    One at a time: the next walk of a group overwrites what this one copied.
    """

    def __init__(self, blocks: _GroupBlocks) -> None:
        self._blocks, self._total, self._next = blocks, blocks.total, 0
        since, filled = blocks.walked
        np.copyto(since, blocks.since)
        np.copyto(filled, blocks.filled)  # a partial block may grow meanwhile

    @property
    def total(self) -> int:
        """Slots of the whole walk."""
        return self._total

    def take(self, limit: int) -> CachedSlots:
        """The slots of the next cached blocks: of as many as have `limit` slots at most, but of one."""
        since, filled = self._blocks.walked
        held = np.empty(0, dtype=np.int64)
        count = max(1, limit // self._blocks.block_size)
        while not held.size and self._next < since.size:
            part = since[self._next : self._next + max(count, _SCANNED)]
            held = np.flatnonzero(part != _NEVER)[:count] + self._next
            self._next = int(held[-1]) + 1 if held.size == count else self._next + part.size
        return self._blocks.slots(held, filled[held])


class CachedBlocks(PrefixCache):
    """PrefixCache of a vLLM worker."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, int, int]],
        locked: Callable[[str], set[int]],
        *,
        empty: bool,
    ) -> None:
        """`shapes`: group name -> vLLM's group number (-1 = nothing is cached), blocks, tokens per block; 0
        tokens = a block is one state.

        `locked`: blocks of running requests, by group name. `empty`: no block is cached yet. Without it,
        blocks that were cached before are not known, until the cache is reset.
        """
        self._states = {name for name, (_, _, size) in shapes.items() if not size}
        self._groups = {name: _GroupBlocks(blocks, size or 1) for name, (_, blocks, size) in shapes.items()}
        self._names: dict[int, list[str]] = {}
        for name, (number, _, _) in shapes.items():
            self._names.setdefault(number, []).append(name)
        self._locked = locked
        self._clock = 0
        self._unreported = False
        self._complete = empty  # every cached block is known
        none = BlockCounts(0, 0, 0)
        # By vLLM's group number, from the last output; None = unknown.
        self._counts: Sequence[BlockCounts] | None = [none] * (max(self._names) + 1) if empty else None

    def apply(self, events: Iterable[BlockEvent] | None, counts: Sequence[BlockCounts] | None = None) -> None:
        """Apply the events of one scheduler output, before the forward that it schedules.

        None = the output has no events attribute, so the cache is unknown from now on. `counts`: what the
        pool's map held after these events, by vLLM's group number.
        """
        self._counts = counts
        self._unreported |= events is None
        for event in events or ():
            self._clock += 1
            if isinstance(event, Published | PublishedRun | Partial):
                self._add_event(event)
            elif isinstance(event, int):
                self._evict(event)
            elif event is None or isinstance(event, EventsLost):
                # Blocks that the worker forgets are still counted by the scheduler: the next sweep fails.
                self._evict(slice(None))
                self._complete = event is None

    def _evict(self, blocks: int | slice) -> None:
        # Block numbers are the pool's, common to all groups.
        for group in self._groups.values():
            group.evict(blocks)

    def _add_event(self, event: Published | PublishedRun | Partial) -> None:
        for name in self._names.get(event.group, ()):
            if name in self._states:  # each is a sequence of its own
                for block in event.blocks if isinstance(event, PublishedRun) else (event.block,):
                    self._add(self._groups[name], Published(event.group, block, 0, -1, 1))
            elif isinstance(event, Partial):
                self._add_part(self._groups[name], event)
            elif isinstance(event, Published):
                self._add(self._groups[name], event)
            else:
                self._add_run(self._groups[name], event)

    def _add(self, group: _GroupBlocks, event: Published) -> None:
        before = group.since[event.previous] if event.previous >= 0 else _NEVER
        group.evict(event.block)
        group.since[event.block] = self._clock
        group.total += event.filled
        group.columns[event.block] = event.number, event.previous, before
        group.filled[event.block] = event.filled

    def _add_part(self, group: _GroupBlocks, event: Partial) -> None:
        if group.since[event.block] == _NEVER:
            self._add(group, Published(event.group, event.block, event.number, -1, event.filled))
        else:  # a prompt's last block is published again each time the prompt ends in it
            more = max(event.filled - int(group.filled[event.block]), 0)
            group.filled[event.block] += more
            group.total += more

    def _add_run(self, group: _GroupBlocks, event: PublishedRun) -> None:
        blocks = np.array(event.blocks, dtype=np.int64)
        rows = np.empty((blocks.size, 3), dtype=np.int64)
        rows[:, 0] = np.arange(event.number, event.number + blocks.size)
        rows[0, 1], rows[1:, 1] = event.previous, blocks[:-1]
        rows[0, 2] = group.since[event.previous] if event.previous >= 0 else _NEVER
        rows[1:, 2] = self._clock
        group.evict(blocks)
        group.total += event.filled * blocks.size
        group.since[blocks], group.columns[blocks], group.filled[blocks] = self._clock, rows, event.filled

    def cached(self, group: str, *, unlocked_only: bool) -> CachedSlots:
        """Every slot of the cached blocks; links to evicted blocks are left out."""
        blocks = self._begin(group)
        held = np.flatnonzero(blocks.since != _NEVER)
        if unlocked_only:
            held = np.setdiff1d(held, np.fromiter(self._locked(group), dtype=np.int64))
        return blocks.slots(held, blocks.filled[held])

    def walk(self, group: str) -> CachedWalk:
        """The same of the whole group, block by block."""
        return _BlockWalk(self._begin(group))

    def _begin(self, group: str) -> _GroupBlocks:
        if self._unreported:
            raise UnsupportedEngine(
                "vLLM's scheduler does not report its prefix cache: pass the LLM to install_canary, not its "
                "model runner; with the plugin, load it in the engine-core process too, and use vLLM's own "
                "scheduler class"
            )
        blocks = self._groups[group]
        blocks.mark = self._clock
        return blocks

    def count(self, group: str) -> CachedCount | None:
        """What the pool's map held when the last output was made; None = its scheduler does not report."""
        if self._counts is None:
            return None
        number = next(number for number, names in self._names.items() if group in names)
        cached, removed, unfilled = self._counts[number] if number >= 0 else BlockCounts(0, 0, 0)
        size = self._groups[group].block_size
        unfilled = 0 if group in self._states else unfilled
        return CachedCount(slots=cached * size - unfilled, removed=removed * size)

    def still_cached(self, group: str, slots: Tensor) -> Tensor:
        """bool [n]: cached since before the last call of `cached` or `walk`."""
        blocks = self._groups[group]
        return torch.from_numpy(blocks.since[slots.numpy() // blocks.block_size] <= blocks.mark)

    def live_blocks(self, group: str) -> set[int]:
        """Blocks that may be cached now: all of them, as long as not every cached block is known."""
        if not self._complete:
            return set(range(1, self._groups[group].num_blocks))
        return set(np.flatnonzero(self._groups[group].since != _NEVER).tolist())
