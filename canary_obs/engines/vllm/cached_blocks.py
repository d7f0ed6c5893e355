"""The prefix cache as the worker knows it: a mirror of the scheduler's block pool, fed by its events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from canary_obs.engine_api.adapter import PrefixCache
from canary_obs.engine_api.views import CachedSlots
from canary_obs.errors import UnsupportedEngine

_NEVER = np.iinfo(np.int64).max


class Published(NamedTuple):
    """The pool made a block findable: the request's `number`-th block, `filled` tokens of it valid."""

    group: int
    block: int
    number: int
    previous: int  # the request's block before it; -1 = none or null
    filled: int


class PublishedRun(NamedTuple):
    """Several blocks of a request in a row, in one event: a long prompt publishes hundreds at once."""

    group: int
    blocks: tuple[int, ...]  # at least two
    number: int  # of the first
    previous: int  # before the first
    filled: int  # tokens valid in each

    def single(self, place: int) -> Published:
        """One of them."""
        previous = self.blocks[place - 1] if place else self.previous
        return Published(self.group, self.blocks[place], self.number + place, previous, self.filled)


class Loaded(NamedTuple):
    """A KV connector fills these offsets of a block: bytes from elsewhere, without records."""

    group: int
    block: int
    first: int
    stop: int


# What happened, in order: blocks published or loaded, a block's number withdrawn, None = all withdrawn.
BlockEvent = Published | PublishedRun | Loaded | int | None


@dataclass(slots=True)
class _GroupBlocks:
    """One group's blocks. `since` is the mirror's clock at publication, _NEVER when not cached."""

    num_blocks: int
    block_size: int
    since: np.ndarray[tuple[int], np.dtype[np.int64]] = field(init=False)
    withdrawn: np.ndarray[tuple[int], np.dtype[np.int64]] = field(init=False)  # clock; -1 = never
    columns: np.ndarray[tuple[int, int], np.dtype[np.int64]] = field(init=False)
    mark: int = -1

    def __post_init__(self) -> None:
        self.since = np.full(self.num_blocks, _NEVER, dtype=np.int64)
        self.withdrawn = np.full(self.num_blocks, -1, dtype=np.int64)
        # number in the request, previous block, that block's `since`, filled
        self.columns = np.zeros((self.num_blocks, 4), dtype=np.int64)


class CachedBlocks(PrefixCache):
    """PrefixCacheView of a vLLM worker."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, int, int]],
        locked: Callable[[str], set[int]],
        *,
        empty: bool,
    ) -> None:
        """`shapes`: group name -> vLLM's group number, blocks, tokens per block.

        `locked`: blocks of running requests, by group name. `empty`: no block is cached yet. Without it,
        blocks that were cached before are not known, until the cache is reset.
        """
        self._groups = {name: _GroupBlocks(blocks, size) for name, (_, blocks, size) in shapes.items()}
        self._names: dict[int, list[str]] = {}
        for name, (number, _, _) in shapes.items():
            self._names.setdefault(number, []).append(name)
        self._locked = locked
        self._clock = 0
        self._unreported = False
        self._complete = empty  # every cached block is known

    def apply(self, events: Iterable[BlockEvent] | None) -> None:
        """Follow the pool; called with every scheduler output, before the forward that it schedules.

        None: the output carries no report, so that nothing is known of the cache from now on.
        """
        self._unreported |= events is None
        for event in events or ():
            self._clock += 1
            if isinstance(event, Published | PublishedRun):
                self._publish(event)
            elif isinstance(event, int):
                self._withdraw(event)
            elif event is None:
                self._withdraw(slice(None))
                self._complete = True

    def _withdraw(self, blocks: int | slice) -> None:
        # A number stands for one block of the pool, whichever group owns it now.
        for group in self._groups.values():
            group.since[blocks] = _NEVER
            group.withdrawn[blocks] = self._clock

    def _publish(self, event: Published | PublishedRun) -> None:
        for name in self._names.get(event.group, ()):
            if isinstance(event, Published):
                self._enter(self._groups[name], event)
            else:
                self._enter_run(self._groups[name], event)

    def _enter(self, group: _GroupBlocks, event: Published) -> None:
        before = group.since[event.previous] if event.previous >= 0 else _NEVER
        group.since[event.block] = self._clock
        group.columns[event.block] = event.number, event.previous, before, event.filled

    def _enter_run(self, group: _GroupBlocks, event: PublishedRun) -> None:
        blocks = np.array(event.blocks, dtype=np.int64)
        rows = np.empty((blocks.size, 4), dtype=np.int64)
        rows[:, 0] = np.arange(event.number, event.number + blocks.size)
        rows[0, 1], rows[1:, 1] = event.previous, blocks[:-1]
        rows[0, 2] = group.since[event.previous] if event.previous >= 0 else _NEVER
        rows[1:, 2] = self._clock
        rows[:, 3] = event.filled
        group.since[blocks], group.columns[blocks] = self._clock, rows

    def cached(self, group: str, *, unlocked_only: bool) -> CachedSlots:
        """Every slot of a published block; links to a block that is gone are left out."""
        if self._unreported:
            raise UnsupportedEngine(
                "vLLM's scheduler does not report its prefix cache: pass the LLM to install_canary, not its "
                "model runner; with the plugin, load it in the engine-core process too, and use vLLM's own "
                "scheduler class"
            )
        blocks = self._groups[group]
        blocks.mark = self._clock
        held = np.flatnonzero(blocks.since != _NEVER)
        if unlocked_only:
            held = np.setdiff1d(held, np.fromiter(self._locked(group), dtype=np.int64))
        order, _, _, filled = blocks.columns[held].T
        offsets = np.arange(blocks.block_size)
        valid = offsets < filled[:, None]
        slots = held[:, None] * blocks.block_size + offsets
        previous = slots - 1
        if held.size:
            previous[:, 0] = self._links(blocks, held)
        positions = order[:, None] * blocks.block_size + offsets
        columns = (torch.from_numpy(column[valid]) for column in (slots, positions, previous))
        return CachedSlots(**dict(zip(("slots", "positions", "previous"), columns, strict=True)))

    @staticmethod
    def _links(blocks: _GroupBlocks, held: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[
        tuple[int], np.dtype[np.int64]
    ]:  # fmt: skip
        _, previous, before, _ = blocks.columns[held].T
        intact = (previous >= 0) & (before != _NEVER) & (blocks.since[previous] == before)
        return np.where(intact, previous * blocks.block_size + blocks.block_size - 1, -1)

    def still_cached(self, group: str, slots: Tensor) -> Tensor:
        """bool [n]: published before the last `cached` call and still; for a first slot its link too."""
        blocks = self._groups[group]
        numbers, offsets = np.divmod(slots.numpy(), blocks.block_size)
        held = blocks.since[numbers] <= blocks.mark
        previous = blocks.columns[numbers, 1]
        # A linked block that is taken meanwhile would look like a broken chain.
        lost = (offsets == 0) & (previous >= 0) & (blocks.withdrawn[previous] > blocks.mark)
        return torch.from_numpy(held & ~lost)

    def live_blocks(self, group: str) -> set[int]:
        """Blocks that may be cached now: all of them, as long as not every cached block is known."""
        if not self._complete:
            return set(range(1, self._groups[group].num_blocks))
        return set(np.flatnonzero(self._groups[group].since != _NEVER).tolist())
