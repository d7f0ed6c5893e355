"""What is known of a block that has arrived: one row of int64 per block. Nothing here imports torch."""

from __future__ import annotations

from enum import IntEnum


class Arrival(IntEnum):
    """Columns of a row. COPIES: how many copies' fingerprints are given; the rest of them is not read."""

    SLOT = 0
    POSITION = 1
    SLOTS = 2
    COPIES = 3
    UNCHANGED_K = 4
    UNCHANGED_V = 5
    NOW_K = 6
    NOW_V = 7


class Edge(IntEnum):
    """Columns of what is said of a block. From FIRST up to STOP its slots have arrived.

    COPIES as in `Arrival`; their fingerprints are those of the first FILLED slots.
    """

    FIRST = 0
    STOP = 1
    COPIES = 2
    FILLED = 3


class Unchanged(IntEnum):
    """Whether a part's bytes are those that lay there before the load.

    REPLACED: they are, and cannot rightly be, because the block held other tokens, or nothing.
    """

    CHANGED = 0
    SAME = 1
    REPLACED = 2


ARRIVAL_WORDS = len(Arrival)
EDGE_WORDS = len(Edge)
