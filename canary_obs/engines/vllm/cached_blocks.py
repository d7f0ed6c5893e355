"""The prefix cache as a worker knows it, from the events of the scheduler's block pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from canary_obs.engine_api.adapter import PrefixCache
from canary_obs.engine_api.views import CachedCount, CachedSlots
from canary_obs.engine_api.walks import CachedWalk
from canary_obs.engines.toolkit.later import Later
from canary_obs.engines.vllm.cache_count import BlockCounts
from canary_obs.engines.vllm.group_blocks import NEVER, Blocks, BlockWalk, GroupBlocks
from canary_obs.engines.vllm.pool_events import (
    BlockEvent,
    EventsLost,
    Loaded,
    LoadTokens,
    Partial,
    Published,
    PublishedRun,
)
from canary_obs.errors import UnsupportedEngine

_PENDING = 128  # events that are applied together: as many as 64 requests' new blocks bring in a full pool
_MOST_PENDING = 1 << 16  # of outputs without a forward
_SINGLE = frozenset({int, Published})
_Counts = Sequence[BlockCounts]


class CachedBlocks(PrefixCache):
    """PrefixCache of a vLLM worker."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, int, int]],
        locked: Callable[[str], set[int]],
        *,
        empty: bool,
        slot_tokens: Mapping[str, int] | None = None,
    ) -> None:
        """`shapes`: group name -> vLLM's group number (-1 = nothing is cached), blocks, slots per block; 0
        slots = a block is one state. `slot_tokens`: tokens of a slot, of the groups where it has several.

        `locked`: blocks of running requests, by group name. `empty`: no block is cached yet. Without it,
        blocks that were cached before are not known, until the cache is reset.
        """
        self._states = {name for name, (_, _, size) in shapes.items() if not size}
        tokens = slot_tokens or {}
        self._groups = {
            name: GroupBlocks(blocks, size or 1, tokens.get(name, 1))
            for name, (_, blocks, size) in shapes.items()
        }
        self._names: dict[int, list[str]] = {}
        for name, (number, _, _) in shapes.items():
            self._names.setdefault(number, []).append(name)
        self._locked = locked
        self._clock = 0  # events applied
        self._pending: list[BlockEvent] = []  # not applied yet: when somebody asks, or there are many
        self.due = False  # there are many, or the counts are to be computed
        self._unreported = False
        self._complete = empty  # every cached block is known
        none = BlockCounts(0, 0)
        # By vLLM's group number, from the last output; None = unknown.
        self._counts: _Counts | Later[_Counts] | None = [none] * (max(self._names) + 1) if empty else None

    def apply(
        self, events: Iterable[BlockEvent] | None, counts: _Counts | Later[_Counts] | None = None
    ) -> None:
        """Apply the events of one scheduler output, before the forward that it schedules.

        None = the output has no events attribute, so the cache is unknown from now on. `counts`: what the
        pool's map held after these events, by vLLM's group number.
        """
        self._counts = counts
        if type(counts) is Later:
            self.due = True
        self._unreported |= events is None
        if events:
            self._pending += events
            self.due = self.due or len(self._pending) >= _PENDING
            if len(self._pending) >= _MOST_PENDING:
                self.settle()

    def catch_up(self) -> None:
        """Do what is `due`: best after the launch of a forward."""
        self.due = False
        if type(self._counts) is Later:
            self._counts = self._counts.get()
        if len(self._pending) >= _PENDING:
            self.settle()

    def settle(self) -> None:
        """Apply the events so far: when there are many, or somebody asks."""
        pending, self._pending = self._pending, []
        if _SINGLE.issuperset(map(type, pending)):  # while requests decode, all are
            self._follow(cast("list[Published | int]", pending))
            return
        for kind, run in groupby(pending, type):
            events: list[Any] = list(run)
            if kind is int:
                self._clock += len(events)
                self._evict(np.array([*{*events}], dtype=np.int64))  # each is counted once
            elif kind is Published:
                self._follow(events)
            else:
                for event in events:
                    self._clock += 1
                    self._apply(event)

    def _follow(self, events: Sequence[Published | int]) -> None:
        if events:
            for number, names in self._names.items():
                for name in names:
                    self._groups[name].follow(events, self._clock + 1, number, states=name in self._states)
            self._clock += len(events)

    def _apply(self, event: PublishedRun | Partial | LoadTokens | Loaded | EventsLost | None) -> None:
        if isinstance(event, PublishedRun | Partial):
            self._add_event(event)
        elif event is None or isinstance(event, EventsLost):
            # Blocks that the worker forgets are still counted by the scheduler: the next sweep fails.
            self._evict(slice(None))
            self._complete = event is None

    def _evict(self, blocks: slice | Blocks) -> None:
        # Block numbers are the pool's, common to all groups.
        for group in self._groups.values():
            group.evict(blocks)

    def _add_event(self, event: PublishedRun | Partial) -> None:
        for name in self._names.get(event.group, ()):
            if name in self._states:
                for block in event.blocks if isinstance(event, PublishedRun) else (event.block,):
                    self._publish(name, Published(event.group, block, 0, -1, 1))
            elif isinstance(event, Partial):
                self._add_part(name, event)
            else:
                self._add_run(self._groups[name], event)

    def _publish(self, name: str, event: Published) -> None:
        self._groups[name].follow([event], self._clock, event.group, states=name in self._states)

    def _add_part(self, name: str, event: Partial) -> None:
        group = self._groups[name]
        if group.since[event.block] == NEVER:
            self._publish(name, Published(event.group, event.block, event.number, -1, event.filled))
        else:  # a prompt's last block is published again each time the prompt ends in it
            more = max(event.filled // group.slot_tokens - int(group.filled[event.block]), 0)
            group.filled[event.block] += more
            group.total += more

    def _add_run(self, group: GroupBlocks, event: PublishedRun) -> None:
        blocks, filled = np.array(event.blocks, dtype=np.int64), event.filled // group.slot_tokens
        rows = np.empty((blocks.size, 3), dtype=np.int64)
        rows[:, 0] = np.arange(event.number, event.number + blocks.size)
        rows[0, 1], rows[1:, 1] = event.previous, blocks[:-1]
        rows[0, 2] = group.since[event.previous] if event.previous >= 0 else NEVER
        rows[1:, 2] = self._clock
        group.evict(blocks)
        group.total += filled * blocks.size
        group.since[blocks], group.columns[blocks], group.filled[blocks] = self._clock, rows, filled

    def cached(self, group: str, *, unlocked_only: bool) -> CachedSlots:
        """Every slot of the cached blocks; links to evicted blocks are left out."""
        blocks = self._begin(group)
        held = np.flatnonzero(blocks.since != NEVER)
        if unlocked_only:
            held = np.setdiff1d(held, np.fromiter(self._locked(group), dtype=np.int64))
        return blocks.slots(held, blocks.filled[held])

    def walk(self, group: str) -> CachedWalk:
        """The same of the whole group, block by block."""
        return BlockWalk(self._begin(group), self.settle)

    def _begin(self, group: str) -> GroupBlocks:
        if self._unreported:
            raise UnsupportedEngine(
                "vLLM's scheduler does not report its prefix cache: pass the LLM to install_canary, not its "
                "model runner; with the plugin, load it in the engine-core process too, and use vLLM's own "
                "scheduler class"
            )
        self.settle()
        blocks = self._groups[group]
        blocks.mark = self._clock
        return blocks

    def count(self, group: str) -> CachedCount | None:
        """What the pool's map held when the last output was made; None = its scheduler does not report."""
        counts = self._counts
        if type(counts) is Later:
            counts = self._counts = counts.get()
        if counts is None:
            return None
        number = next(number for number, names in self._names.items() if group in names)
        cached, removed, room = counts[number] if number >= 0 else BlockCounts(0, 0)
        size, tokens = self._groups[group].block_size, self._groups[group].slot_tokens
        # A slot that stands for several tokens is filled with the last of them.
        unfilled = 0 if group in self._states else sum(-(-left // tokens) * n for left, n in room)
        return CachedCount(slots=cached * size - unfilled, removed=removed * size)

    def still_cached(self, group: str, slots: Tensor) -> Tensor:
        """bool [n]: cached since before the last call of `cached` or `walk`."""
        self.settle()
        blocks = self._groups[group]
        return torch.from_numpy(blocks.since[slots.numpy() // blocks.block_size] <= blocks.mark)

    def live_blocks(self, group: str) -> Blocks:
        """Blocks that may be cached now: all of them, as long as not every cached block is known."""
        self.settle()
        if not self._complete:
            return np.arange(1, self._groups[group].num_blocks)
        return np.flatnonzero(self._groups[group].since != NEVER)
