"""Chains over token lists that the host has, advanced for a whole batch at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from canary_kernels.hashing import mix_arrays
from canary_kernels.layout import CHAIN_ANCHOR

ANCHOR = np.uint64(CHAIN_ANCHOR)  # the chain over no tokens


def added_chains(
    chains: NDArray[np.uint64], ids: NDArray[np.int32], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """uint64 [n]: chains after the tokens from `starts` up to `stops` of each request, laid end to end."""
    sizes = np.maximum(stops - starts, 0)
    ends = sizes.cumsum()
    positions = np.arange(ids.size) - np.repeat(ends - sizes - starts, sizes)
    sums = np.concatenate((np.zeros(1, dtype=np.uint64), mix_arrays(ids, positions).cumsum()))
    added: NDArray[np.uint64] = chains + sums[ends] - sums[ends - sizes]
    return added
