"""The cached blocks of one group, and the walk of a sweep over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from canary_obs.engine_api.views import CachedSlots
from canary_obs.engine_api.walks import CachedWalk
from canary_obs.engines.vllm.pool_events import Published

NEVER = np.iinfo(np.int64).max
_SCANNED = 1 << 15  # blocks that are looked at in one go: few may be cached
Blocks = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(slots=True)
class GroupBlocks:
    """The cached blocks of one group. Clocks count events; `since` is NEVER for blocks not cached."""

    num_blocks: int
    block_size: int  # slots
    slot_tokens: int = 1  # tokens that a slot stands for
    since: np.ndarray[tuple[int], np.dtype[np.int64]] = field(init=False)  # clock when it was cached
    columns: np.ndarray[tuple[int, int], np.dtype[np.int64]] = field(init=False)
    filled: np.ndarray[tuple[int], np.dtype[np.int32]] = field(init=False)  # tokens in the block
    total: int = 0  # slots of all cached blocks, counted as they come and go
    # `since` and `filled` when the last walk began.
    walked: tuple[Blocks, np.ndarray[tuple[int], np.dtype[np.int32]]] = field(init=False)
    mark: int = -1  # clock of the last call of `cached` or `walk`

    def __post_init__(self) -> None:
        self.since = np.full(self.num_blocks, NEVER, dtype=np.int64)
        # number in the request, previous block, that block's `since`
        self.columns = np.zeros((self.num_blocks, 3), dtype=np.int64)
        self.filled = np.zeros(self.num_blocks, dtype=np.int32)
        self.walked = np.full_like(self.since, NEVER), np.zeros_like(self.filled)

    def evict(self, blocks: slice | Blocks) -> None:
        """These blocks are not cached from now on."""
        self.total -= int(self.filled[blocks].sum(where=self.since[blocks] != NEVER))
        self.since[blocks] = NEVER

    def follow(self, events: Sequence[Published | int], clock: int, number: int, *, states: bool) -> None:
        """Apply what one of vLLM's groups published and every group evicted; `clock`: of the first event."""
        since: dict[int, int] = {}  # of every block in the events, after the last of them
        rows: dict[int, tuple[int, int, int, int]] = {}  # columns and filled of those that were published
        for now, event in enumerate(events, clock):
            if isinstance(event, int):
                since[event] = NEVER
                continue
            group, block, place, previous, filled = event
            if group == number:
                if states:  # each is a sequence of its own
                    rows[block] = 0, -1, NEVER, 1
                else:
                    before = since.get(previous)
                    if before is None:
                        before = int(self.since[previous]) if previous >= 0 else NEVER
                    rows[block] = place, previous, before, filled // self.slot_tokens
                since[block] = now
        if not since:
            return
        blocks = np.fromiter(since, dtype=np.int64, count=len(since))
        self.evict(blocks)
        self.since[blocks] = np.fromiter(since.values(), dtype=np.int64, count=len(since))
        if rows:
            published = np.fromiter(rows, dtype=np.int64, count=len(rows))
            columns = np.array(list(rows.values()), dtype=np.int64)
            self.columns[published], self.filled[published] = columns[:, :3], columns[:, 3]
            self.total += int(columns[self.since[published] != NEVER, 3].sum())

    def slots(self, held: Blocks, filled: np.ndarray[tuple[int], np.dtype[np.int32]]) -> CachedSlots:
        """The slots of these blocks, of each as many as are given; links to evicted blocks are left out."""
        order, before, since = self.columns[held].T
        offsets = np.arange(self.block_size)
        valid = offsets < filled[:, None]
        slots = held[:, None] * self.block_size + offsets
        previous = slots - 1
        if held.size:
            intact = (before >= 0) & (since != NEVER) & (self.since[before] == since)
            previous[:, 0] = np.where(intact, before * self.block_size + self.block_size - 1, -1)
        positions = order[:, None] * self.block_size + offsets
        columns = (torch.from_numpy(column[valid]) for column in (slots, positions, previous))
        return CachedSlots(**dict(zip(("slots", "positions", "previous"), columns, strict=True)))


class BlockWalk(CachedWalk):
    """Copies two numbers per block; slots, many times as many, are computed as they are taken.

    One at a time: the next walk of a group overwrites what this one copied.
    """

    def __init__(self, blocks: GroupBlocks, settle: Callable[[], None]) -> None:
        """`settle`: applies what is known of the blocks by now."""
        self._blocks, self._settle, self._total, self._next = blocks, settle, blocks.total, 0
        since, filled = blocks.walked
        np.copyto(since, blocks.since)
        np.copyto(filled, blocks.filled)  # a partial block may grow meanwhile

    @property
    def total(self) -> int:
        """Slots of the whole walk."""
        return self._total

    def take(self, limit: int) -> CachedSlots:
        """The slots of the next cached blocks: of as many as have `limit` slots at most, but of one."""
        self._settle()
        since, filled = self._blocks.walked
        held = np.empty(0, dtype=np.int64)
        count = max(1, limit // self._blocks.block_size)
        while not held.size and self._next < since.size:
            part = since[self._next : self._next + max(count, _SCANNED)]
            held = np.flatnonzero(part != NEVER)[:count] + self._next
            self._next = int(held[-1]) + 1 if held.size == count else self._next + part.size
        return self._blocks.slots(held, filled[held])
