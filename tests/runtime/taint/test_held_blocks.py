"""Blocks of requests that go on become rows together; every reader sees them as rows."""

from __future__ import annotations

import numpy as np
import pytest

from canary_obs.engine_api.requests import AddedBlocks, GrownBlock
from canary_obs.runtime.taint.held_blocks import HeldBlocks


def grown(held: HeldBlocks, blocks: range, life: int, start: int) -> None:
    for block in blocks:
        held.add_one_each([life], [GrownBlock("r", block, block, 16 * block)], start)


@pytest.mark.parametrize("count", [1, 63, 64, 1500])
def test_rows_are_in_the_order_of_their_forwards(count: int) -> None:
    held = HeldBlocks()
    held.add(0, AddedBlocks(np.arange(3), 0, 2), 1, 8)
    grown(held, range(3, 3 + count), life=0, start=2)
    assert held.count == 3 + count
    held.add(1, AddedBlocks(np.arange(2), 0, 2), 3, 32)
    grown(held, range(5000, 5001), life=1, start=4)
    assert held.count == 6 + count
    assert held.holds(1, 5000)
    assert held.computed_at(0, 2) == 16 * (2 + count)
    held.add(0, AddedBlocks(np.array([9000]), 3 + count, 0), 4, 8)
    blocks, since = held.filled_since(0, 0)
    assert blocks.tolist() == [*range(2, 3 + count), 9000]
    assert since.tolist() == [1] + [2] * count + [4]
    assert held._columns[0, : held.count].tolist() == [*range(3 + count), 0, 1, 5000, 9000]
    grown(held, range(6000, 6001), life=1, start=5)
    held.keep(np.array([1]))
    assert held.count == 4
    assert held.filled_since(0, 0)[0].tolist() == [5000, 6000]
