"""Which forward began to fill a block last: one number per block, where rows would have to be searched."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from canary_obs.runtime.taint.held_blocks import HeldBlocks, Ints

Bools = NDArray[np.bool_]
NEVER, UNKNOWN = -1, -2  # no forward that is followed; one of those before the last two


class LastFills:
    """Of each block, the forwards that began its last filling and the one before; NEVER = none."""

    def __init__(self, held: HeldBlocks) -> None:
        """Those that are held by now."""
        self._last = np.full(1024, NEVER, dtype=np.int64)
        self._before = self._last.copy()
        blocks, starts = held.fills()
        order = np.argsort(starts, kind="stable")
        for start in np.unique(starts):
            self.add(blocks[order][starts[order] == start], int(start))

    def add(self, blocks: Ints, start: int) -> None:
        """These blocks (none twice) are filled from forward `start` on."""
        if not blocks.size:
            return
        if (most := int(blocks.max())) >= self._last.size:
            more = np.full(max(most + 1, 2 * self._last.size) - self._last.size, NEVER, dtype=np.int64)
            self._last, self._before = np.append(self._last, more), np.append(self._before, more)
        fresh = blocks[self._last[blocks] < start]
        self._before[fresh] = self._last[fresh]
        self._last[fresh] = start

    def at(self, blocks: Ints, step: int) -> Ints:
        """The forward that began to fill what each block held after forward `step`; NEVER, UNKNOWN."""
        own = np.minimum(blocks, self._last.size - 1)
        last, before = self._last[own], self._before[own]
        found = np.where(last <= step, last, np.where(before <= step, before, UNKNOWN))
        return np.where(own == blocks, found, NEVER)

    def are_filled_since(self, blocks: Ints, starts: Ints) -> Bools:
        """Whether that forward or a later one began to fill each block."""
        own = np.minimum(blocks, self._last.size - 1)
        found: Bools = (own == blocks) & (self._last[own] >= starts)
        return found
