"""Splits the heads that a rank holds, for receivers whose ranks hold fewer of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from canary_kernels.buffers import KVSource

_WORD_BYTES = 4


def head_shares(sources: Sequence[KVSource], readers: Iterable[int]) -> list[range]:
    """Ranges of global heads, together all that are held here, each held whole by some receiver's rank.

    `readers`: for each receiver, how many of its ranks read from this one. Empty where nothing is to be
    split, or cannot be: layers with different heads, or heads that are not whole words.
    """
    held = {(source.head_start, source.num_heads) for source in sources}
    if len(held) != 1 or any(source.head_bytes % _WORD_BYTES for source in sources):
        return []
    ((first, count),) = held
    # Where heads are fewer than ranks, several ranks hold the same one.
    size = count // math.lcm(*(math.gcd(count, ranks) for ranks in readers))
    return [range(start, start + size) for start in range(first, first + count, size)] if size < count else []
