"""How a rank's heads are split for receivers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from canary_obs.engines.toolkit.head_shares import head_shares


@dataclass(frozen=True)
class Source:
    head_start: int
    num_heads: int
    head_bytes: int = 64


@pytest.mark.parametrize(
    ("heads", "readers", "found"),
    [
        (4, [2], [range(8, 10), range(10, 12)]),
        (4, [2, 4], [range(8, 9), range(9, 10), range(10, 11), range(11, 12)]),
        (6, [2, 3], [range(8 + head, 9 + head) for head in range(6)]),
        (2, [8], [range(8, 9), range(9, 10)]),  # four ranks hold the same head
        (4, [1], []),
        (1, [8], []),
        (4, [], []),
    ],
)
def test_each_receiver_holds_whole_shares(heads: int, readers: list[int], found: list[range]) -> None:
    assert head_shares([Source(8, heads)] * 2, readers) == found  # type: ignore[list-item]


@given(st.integers(1, 64), st.sets(st.integers(1, 64), min_size=1, max_size=4), st.integers(0, 64))
def test_shares_are_all_heads_once(heads: int, readers: set[int], first: int) -> None:
    shares = head_shares([Source(first, heads)], readers) or [range(first, first + heads)]  # type: ignore[list-item]
    assert [head for share in shares for head in share] == list(range(first, first + heads))
    for ranks in readers:
        if heads % ranks == 0:
            ends = {share.stop for share in shares}
            assert {first + heads // ranks * (rank + 1) for rank in range(ranks)} <= ends


@pytest.mark.parametrize(
    "sources",
    [[Source(0, 4), Source(0, 2)], [Source(0, 4, head_bytes=6)], []],
    ids=["differ", "words", "none"],
)
def test_what_cannot_be_split_stays_whole(sources: list[Source]) -> None:
    assert head_shares(sources, [2]) == []  # type: ignore[arg-type]
