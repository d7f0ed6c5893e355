"""Surrogate tokens, one for each run of tokens, for the records of compressed entries."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from canary_kernels.hashing import mix_arrays

_BITS = 31  # a record's token is a signed 32-bit word; the write oracle reads a negative one as "unknown"


def surrogate_tokens(tokens: NDArray[np.int32], ratio: int) -> NDArray[np.int32]:
    """int32 [n]: one for each run of `ratio` tokens of int32 [n * ratio].

    It depends on every token of the run and on its place.
    """
    if ratio == 1:
        return tokens
    mixed = mix_arrays(tokens, np.tile(np.arange(ratio), tokens.size // ratio))
    folded = np.add.reduceat(mixed, np.arange(0, mixed.size, ratio)) if mixed.size else mixed
    folded >>= np.uint64(64 - _BITS)
    return folded.astype(np.int32)
