"""Copies of blocks in a lower tier: what is loaded was filled by a request before, often in another block."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import NamedTuple, TypeVar

import numpy as np

from canary_obs.engine_api.requests import KeyedBlocks
from canary_obs.runtime.taint.held_blocks import Content, HeldBlocks, Ints
from canary_obs.runtime.taint.last_fills import NEVER, UNKNOWN as UNKNOWN_FILL, LastFills

COPIES_KEPT = 1 << 16  # of one numbering: that are stored, and that were loaded


NO_BLOCKS = np.empty(0, dtype=np.int64)
_NONE = (-1,)
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Origin(NamedTuple):
    """A block, and the forward that began to fill it with what was stored; None = by nobody followed."""

    block: int
    since: int | None


_BEFORE, UNKNOWN = Origin(-1, None), Origin(-2, None)  # computed before all that is followed; or nobody knows


class Copy(NamedTuple):
    """A block that holds a copy from forward `start` on, until a request fills the block."""

    block: int
    start: int


class StoredBlocks:
    """Of one numbering. `forgotten_until`: the last forward of any copy that is forgotten; -1 = none is."""

    def __init__(self, held: HeldBlocks, kept: int) -> None:
        self._held, self._kept = held, kept
        self._fills: LastFills | None = None  # until something is stored or loaded
        self._stored: OrderedDict[bytes, tuple[Origin, int]] = OrderedDict()  # and after which forward
        self._absent = _BEFORE  # what was stored under a key that is not known
        self._copies: OrderedDict[Copy, Origin] = OrderedDict()
        self._copies_of: dict[Origin, list[Copy]] = defaultdict(list)
        self._loads: dict[int, list[int]] = defaultdict(list)  # first forwards, by block, in order
        # By forward: blocks that requests began to fill then and that hold copies, and when these came.
        self._begun: OrderedDict[int, dict[int, int]] = OrderedDict()
        self._blocks_begun = 0
        self._begins: dict[Copy, int] = {}  # the same by copy, but for the forwards in `_not_indexed`
        self._not_indexed: list[int] = []
        self.forgotten_until = -1
        self.loads = 0  # blocks so far

    def fill(self, blocks: Ints, start: int) -> None:
        """Requests fill these blocks from forward `start` on."""
        if self._fills is not None:
            self._fills.add(blocks, start)

    def store(self, stored: KeyedBlocks, step: int) -> None:
        """Copies of blocks are kept, as forward `step` left them."""
        since = self._last_fills().at(stored.blocks, step).tolist()
        for key, block, filled in zip(stored.keys, stored.blocks.tolist(), since, strict=True):
            if not key:
                self._stored.clear()  # it may be one of those
                self._absent = UNKNOWN
                continue
            self._stored[key] = self._origin(block, filled, step), step
            self._stored.move_to_end(key)
        while len(self._stored) > self._kept:
            _, (_, last) = self._stored.popitem(last=False)
            self._absent = UNKNOWN
            self.forgotten_until = max(self.forgotten_until, last)

    def load(self, loaded: KeyedBlocks, start: int) -> list[Origin]:
        """Copies are in these blocks from forward `start` on. Returns what each of them is a copy of."""
        found = []
        self._last_fills()
        for key, block in zip(loaded.keys, loaded.blocks.tolist(), strict=True):
            origin = self._stored.get(key, (self._absent, 0))[0] if key else UNKNOWN
            if origin == UNKNOWN:
                self.forgotten_until = max(self.forgotten_until, start)
            self._add(Copy(block, start), origin)
            found.append(origin)
        self._bound()
        return found

    def begun(self, blocks: Ints, start: int) -> Ints:
        """A request whose load is complete begins with these blocks; returns those that hold its copies."""
        if not self._loads or self._fills is None:
            return NO_BLOCKS
        loads = [self._loads.get(block, _NONE)[-1] for block in blocks.tolist()]
        came = np.array(loads, dtype=np.int64)
        there = (came >= 0) & ~self._fills.are_filled_since(blocks, came)
        if not there.any():
            return NO_BLOCKS
        if start not in self._begun:
            self._begun[start] = {}
            self._not_indexed.append(start)
        own = self._begun[start]
        own.update(zip(blocks[there].tolist(), came[there].tolist(), strict=True))
        self._blocks_begun += int(there.sum())
        self.loads += 1
        while self._blocks_begun > self._kept and len(self._begun) > 1:
            self._forget_oldest_begun()
        return blocks[there]

    def _forget_oldest_begun(self) -> None:
        self._index()
        start, own = self._begun.popitem(last=False)
        for block, came in own.items():
            self._begins.pop(Copy(block, came), None)
        self._blocks_begun -= len(own)
        self.forgotten_until = max(self.forgotten_until, start)

    def _index(self) -> None:
        for start in self._not_indexed:
            self._begins.update((Copy(block, came), start) for block, came in self._begun[start].items())
        self._not_indexed.clear()

    def not_loaded_since(self, blocks: Ints, since: Ints) -> Ints:
        """Those of these blocks over whose contents no copy was loaded."""
        if not self._loads:
            return blocks
        loaded = [
            max(self._loads.get(block, (-1,))) > filled
            for block, filled in zip(blocks.tolist(), since.tolist(), strict=True)
        ]
        return blocks[~np.array(loaded, dtype=np.bool_)]

    def joined_later(self, blocks: Ints, since: Ints) -> tuple[list[tuple[int, int]], list[int]]:
        """Lives that read copies of these contents, since which forward, and blocks that hold one now."""
        joined, there = list[tuple[int, int]](), list[int]()
        if not self._copies:
            return joined, there
        self._index()
        for origin in map(Origin, blocks.tolist(), since.tolist()):
            for copy in self._copies_of.get(origin, ()):
                block, start = copy
                begun = self._begins.get(copy)
                until = self._until(block, start, start - 1)
                lives, starts, joins = self._held.of_content(block, Content(start, until))
                joined += zip(lives[joins].tolist(), starts[joins].tolist(), strict=True)
                if begun is not None:
                    until = self._until(block, begun, begun)
                    lives, starts, joins = self._held.of_content(block, Content(begun, until))
                    reads = joins | (starts == begun)
                    joined += zip(lives[reads].tolist(), starts[reads].tolist(), strict=True)
                if until is None:
                    there.append(block)
        return joined, there

    def _last_fills(self) -> LastFills:
        if self._fills is None:
            self._fills = LastFills(self._held)
        return self._fills

    def _origin(self, block: int, filled: int, step: int) -> Origin:
        """Of what a block holds after forward `step`; `filled`: the forward that began to fill it."""
        if filled == UNKNOWN_FILL:
            return UNKNOWN
        loads = [start for start in self._loads.get(block, ()) if filled < start <= step + 1]
        if loads:
            return self._copies[Copy(block, max(loads))]
        begun = self._begun.get(filled)
        if begun is not None and (came := begun.get(block)) is not None:
            return self._copies.get(Copy(block, came), UNKNOWN)
        return _BEFORE if filled == NEVER else Origin(block, filled)

    def _until(self, block: int, loaded: int, filled: int) -> int | None:
        """The forward from which on it holds something that was loaded, or filled, after these forwards."""
        loads = [other for other in self._loads.get(block, ()) if other > loaded]
        fill = self._held.content(block, filled, before_refill=False).until
        return min([*loads, *([] if fill is None else [fill])], default=None)

    def _add(self, copy: Copy, origin: Origin) -> None:
        self._forget(copy)
        self.loads += 1
        self._copies[copy] = origin
        if origin.since is not None:
            self._copies_of[origin].append(copy)
        self._loads[copy.block].append(copy.start)

    def _bound(self) -> None:
        while len(self._copies) > self._kept:
            oldest = next(iter(self._copies))
            self._forget(oldest)
            self.forgotten_until = max(self.forgotten_until, oldest.start)

    def _forget(self, copy: Copy) -> None:
        if (origin := self._copies.pop(copy, None)) is not None:
            if origin.since is not None:
                _remove(self._copies_of, origin, copy)
            _remove(self._loads, copy.block, copy.start)


def _remove(lists: dict[_Key, list[_Value]], key: _Key, value: _Value) -> None:
    lists[key].remove(value)
    if not lists[key]:
        del lists[key]


def as_blocks(found: list[int]) -> Ints:
    """Numbers of blocks."""
    return np.array(found, dtype=np.int64)
