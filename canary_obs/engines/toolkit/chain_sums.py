"""Chains over token lists that the host has, advanced for a whole batch at once."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from canary_kernels.checks import Backend
from canary_kernels.digest import extend_runs
from canary_kernels.layout import CHAIN_ANCHOR
from canary_obs.runtime.device.backend import choose_backend

ANCHOR = np.uint64(CHAIN_ANCHOR)  # the chain over no tokens


def token_array(tokens: Sequence[int]) -> NDArray[np.int32]:
    """int32 [n]. Raises struct.error for what is no token."""
    if isinstance(tokens, array) and tokens.typecode == "q":
        wide = np.frombuffer(tokens, dtype=np.int64)
        found = wide.astype(np.int32)
        if not np.array_equal(found, wide):
            raise struct.error("a token is an int32")
        return found
    # NumPy takes 1.5 to 4 times as long for a list.
    room = bytearray(4 * len(tokens))
    struct.pack_into(f"{len(tokens)}i", room, 0, *tokens)
    return np.frombuffer(room, dtype=np.int32)


def added_chains(
    chains: NDArray[np.uint64], ids: NDArray[np.int32], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """uint64 [n]: chains after the tokens from `starts` up to `stops` of each request, laid end to end."""
    after = chains.copy()
    # Compiled code takes no array that cannot be written, and none of another type, as an engine may have.
    tokens = ids if ids.flags.writeable else ids.copy()
    first, last = (np.ascontiguousarray(each, dtype=np.int64) for each in (starts, stops))
    extend_runs(_backend(), tokens, first, last, after.view(np.int64))
    return after


@cache
def _backend() -> Backend:
    return choose_backend("auto", torch.device("cpu"))
