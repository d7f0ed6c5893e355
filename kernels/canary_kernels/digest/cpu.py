"""Digest compiled for the CPU: the chains of a batch in one call."""

from __future__ import annotations

import numpy as np

from canary_kernels.native import kernel
from canary_kernels.native_records import ANCHOR, added, mix64


@kernel("void(int32[:, :], int32[:], int64[::1], int64[::1])")
def extend_chains(tokens, ends, counts, chains):
    """Advance by the engine's token lists."""
    for row in range(ends.shape[0]):
        first, stop, chain = counts[row], np.int64(ends[row]), chains[row]
        if stop < first:
            first, chain = 0, ANCHOR
        for position in range(first, stop):
            chain = added(chain, mix64(np.int64(tokens[row, position]), np.int64(position)))
        counts[row], chains[row] = stop, chain
