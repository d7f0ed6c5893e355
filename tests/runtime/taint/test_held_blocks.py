"""Rows of who held which blocks: blocks that come one by one, and many lives that are looked up at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from canary_obs.engine_api.requests import AddedBlocks, GrownBlocks
from canary_obs.runtime.taint.held_blocks import Content, HeldBlocks

BLOCKS, LIVES, STEPS = 6, 4, 8
ALL = Content(None, None)
# Life, block, number in its list, forward that it begins in, tokens computed, joined.
ROWS = st.lists(
    st.tuples(
        st.integers(0, LIVES - 1), st.integers(0, BLOCKS - 1), st.integers(0, 3), st.integers(0, STEPS),
        st.integers(0, 9), st.booleans(),
    ),
    max_size=24,
)  # fmt: skip


def grown(held: HeldBlocks, blocks: range, life: int, start: int) -> None:
    for block in blocks:
        held.add_one_each([life], GrownBlocks(["r"], [block], [block], [16 * block]), start)


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
    blocks, since = held.filled_since(np.array([0]), np.array([0]))
    assert blocks.tolist() == [*range(2, 3 + count), 9000]
    assert since.tolist() == [1] + [2] * count + [4]
    assert held._columns[0, : held.count].tolist() == [*range(3 + count), 0, 1, 5000, 9000]
    grown(held, range(6000, 6001), life=1, start=5)
    held.keep(np.array([1]))
    assert held.count == 4
    assert held.filled_since(np.array([0]), np.array([0]))[0].tolist() == [5000, 6000]


def held_of(rows: list[tuple[int, int, int, int, int, bool]]) -> HeldBlocks:
    held = HeldBlocks()
    for life, block, number, start, computed, joined in rows:
        held.add(life, AddedBlocks(np.array([block]), number, int(joined)), start, computed)
    return held


def computed(rows, life, step):
    return max((one[4] for one in rows if one[0] == life and one[3] <= step), default=0)


@given(ROWS, st.integers(0, STEPS), st.integers(0, 3))
@example(
    [(0, 0, 0, 5, 0, False), (1, 1, 0, 3, 0, True), (2, 1, 0, 5, 0, False)], 0, 0
)  # joined before it is filled
def test_as_row_by_row(rows, step, number) -> None:
    held = held_of(rows)
    lives = np.arange(LIVES)
    assert held.computed(lives, np.full(LIVES, step)).tolist() == [
        computed(rows, life, step) for life in range(LIVES)
    ] == [held.computed_at(life, step) for life in range(LIVES)]  # fmt: skip

    blocks, since = held.filled_since(lives, np.full(LIVES, number))
    filled = [(block, start) for _, block, at, start, _, joined in rows if not joined and at >= number]
    assert list(zip(blocks.tolist(), since.tolist(), strict=True)) == filled

    latest = {
        block: max((one[3] for one in rows if one[1] == block and not one[5]), default=-1)
        for block in range(BLOCKS)
    }
    assert held.latest_fill(blocks).tolist() == [latest[block] for block in blocks.tolist()]

    later: dict[int, int] = {}
    for life, block, _, start, _, joined in rows:
        fills = [one[3] for one in rows if one[1] == block and not one[5] and one[3] <= start]
        if joined and fills and (block, max(fills)) in filled:
            later[life] = min(start, later.get(life, start))
    assert dict(held.joined_later(blocks, since)) == later


@given(ROWS, ROWS, st.sets(st.integers(0, LIVES - 1)))
def test_nothing_stays_of_what_was_asked_before_a_change(rows, added, kept) -> None:
    held = held_of(rows)

    def answers(of: HeldBlocks) -> list[object]:
        return [
            [[*map(np.ndarray.tolist, of.of_content(block, ALL))] for block in range(BLOCKS)],
            [of.computed_at(life, STEPS) for life in range(LIVES)],
        ]  # fmt: skip

    answers(held)
    numbers = {old: new for new, old in enumerate(sorted(kept))}
    held.keep(np.array(sorted(kept), dtype=np.int64))
    stayed = [(numbers[one[0]], *one[1:]) for one in rows if one[0] in numbers]
    assert answers(held) == answers(held_of(stayed))
    for life, block, number, start, done, joined in added:
        held.add(life, AddedBlocks(np.array([block]), number, int(joined)), start, done)
    assert answers(held) == answers(held_of(stayed + added))
