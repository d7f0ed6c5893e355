"""Copies of blocks in a lower tier: what is loaded was filled by a request before, often in another block."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from canary_obs.engine_api.requests import KeyedBlocks
from canary_obs.runtime.taint.held_blocks import Content, HeldBlocks, Ints

COPIES_KEPT = 1 << 16  # of one numbering: that are stored, and that were loaded


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Origin(NamedTuple):
    """A block, and the forward that began to fill it with what was stored; None = not known."""

    block: int
    since: int | None


class StoredBlocks:
    """Of one numbering. `forgotten_until`: the last forward of any copy that is forgotten; -1 = none is."""

    def __init__(self, held: HeldBlocks, kept: int = COPIES_KEPT) -> None:
        self._held, self._kept = held, kept
        self._stored: OrderedDict[bytes, tuple[Origin, int]] = OrderedDict()  # and after which forward
        self._loads: OrderedDict[tuple[int, int], Origin] = OrderedDict()  # by block, and its first forward
        self._loaded: dict[Origin, list[tuple[int, int]]] = defaultdict(list)
        self._into: dict[int, list[int]] = defaultdict(list)  # first forwards, by block
        self.forgotten_until = -1
        self.loads = 0  # blocks so far

    def store(self, stored: KeyedBlocks, step: int) -> None:
        """Copies of blocks are kept, as forward `step` left them."""
        for key, block in zip(stored.keys, stored.blocks.tolist(), strict=True):
            self._stored[key] = self._origin(block, step), step
            self._stored.move_to_end(key)
        while len(self._stored) > self._kept:
            _, (_, last) = self._stored.popitem(last=False)
            self.forgotten_until = max(self.forgotten_until, last)

    def load(self, loaded: KeyedBlocks, start: int) -> list[tuple[int, list[tuple[int, int]]]]:
        """Copies are in these blocks from forward `start` on.

        Returns the blocks, with the lives that filled what was stored, and its number in their lists.
        """
        found = []
        self.loads += loaded.blocks.size
        for key, block in zip(loaded.keys, loaded.blocks.tolist(), strict=True):
            origin = self._stored.get(key, (Origin(-1, None), 0))[0]
            self._forget((block, start))
            self._loads[block, start] = origin
            if origin.since is not None:
                self._loaded[origin].append((block, start))
            self._into[block].append(start)
            fillers = [] if origin.since is None else self._held.fillers(origin.block, origin.since)
            found.append((block, fillers))
        while len(self._loads) > self._kept:
            oldest = next(iter(self._loads))
            self._forget(oldest)
            self.forgotten_until = max(self.forgotten_until, oldest[1])
        return found

    def joined_later(self, blocks: Ints, since: Ints) -> tuple[list[tuple[int, int]], list[int]]:
        """Lives that joined copies of these contents, since which forward, and blocks that hold one now."""
        joined, there = list[tuple[int, int]](), list[int]()
        for block, start in self._copies_of(blocks, since):
            until = self._until(block, start)
            lives, starts, joins = self._held.of_content(block, Content(start, until))
            joined += zip(lives[joins].tolist(), starts[joins].tolist(), strict=True)
            if until is None:
                there.append(block)
        return joined, there

    def _copies_of(self, blocks: Ints, since: Ints) -> Iterator[tuple[int, int]]:
        if self._loads:
            for origin in map(Origin, blocks.tolist(), since.tolist()):
                yield from self._loaded.get(origin, ())

    def _origin(self, block: int, step: int) -> Origin:
        """Of what a block holds after forward `step`."""
        filled = self._held.content(block, step, before_refill=False).since
        loads = [start for start in self._into.get(block, ()) if start <= step + 1]
        if loads and (filled is None or filled <= max(loads)):
            return self._loads[block, max(loads)]
        return Origin(block, filled)

    def _until(self, block: int, start: int) -> int | None:
        """The forward from which on something else is in it."""
        loads = [other for other in self._into[block] if other > start]
        filled = self._held.content(block, start, before_refill=False).until
        return min([*loads, *([] if filled is None else [filled])], default=None)

    def _forget(self, load: tuple[int, int]) -> None:
        if (origin := self._loads.pop(load, None)) is not None:
            if origin.since is not None:
                _remove(self._loaded, origin, load)
            _remove(self._into, load[0], load[1])


def _remove(lists: dict[_Key, list[_Value]], key: _Key, value: _Value) -> None:
    lists[key].remove(value)
    if not lists[key]:
        del lists[key]


def as_blocks(found: list[int]) -> Ints:
    """Numbers of blocks."""
    return np.array(found, dtype=np.int64)
