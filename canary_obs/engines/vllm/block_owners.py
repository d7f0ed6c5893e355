"""Which of vLLM's KV cache groups has a block: they share one pool, and a block's bytes by turns."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from canary_obs.engines.vllm.window_tables import NULL_BLOCK

_NOBODY = -1  # it was given to no group since attach, and has no records
_ANYBODY = -2  # it may have records in any group


class BlockOwners:
    """The group that each block was given to last, by vLLM's group number.

    Only there it has records: they end when another group gets it.
    """

    def __init__(self, num_blocks: int, numbers: Collection[int], *, empty: bool = False) -> None:
        """`numbers`: of all of vLLM's groups, checked or not. `empty`: no block has KV."""
        self._numbers = numbers
        owner = _NOBODY if empty and len(numbers) > 1 else _ANYBODY
        self._owners = array("h", [owner]) * num_blocks  # read faster, one by one, than a tensor

    def give(self, assigned: Mapping[int, Iterable[int]], zeroed: Iterable[int]) -> dict[int, set[int]]:
        """Blocks whose records end, by group number: others get them, or their bytes are zeroed.

        `assigned`: by the number of the group that gets them. Numbers that are no blocks have no records.
        """
        owners, size, lost = self._owners, len(self._owners), defaultdict[int, set[int]](set)
        for block in zeroed:
            if NULL_BLOCK < block < size and (owner := owners[block]) != _NOBODY:
                for number in self._numbers if owner == _ANYBODY else (owner,):
                    lost[number].add(block)
        for number, blocks in assigned.items():
            others = [other for other in self._numbers if other != number]
            for block in blocks:
                if not NULL_BLOCK < block < size or (owner := owners[block]) == number:
                    continue
                owners[block] = number
                if owner >= 0:
                    lost[owner].add(block)
                elif owner == _ANYBODY:
                    for other in others:
                        lost[other].add(block)
        return lost

    def forget(self) -> None:
        """An output was missed: any block may be anybody's."""
        self._owners = array("h", [_ANYBODY]) * len(self._owners)

    def foreign(self, number: int) -> NDArray[np.int64]:
        """Blocks that this group has not; without those that may be anybody's."""
        owners = np.frombuffer(self._owners, dtype=np.int16)
        return np.flatnonzero((owners != number) & (owners != _ANYBODY))
