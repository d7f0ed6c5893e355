"""Digest compiled for the CPU: the chains of a batch in one call."""

from __future__ import annotations

from struct import Struct

import numpy as np

from canary_kernels.native import kernel, load_int64, store_int64
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


@kernel("int64(int32[::1], int64[::1], int64[::1], int64[::1])")
def extend_runs(tokens, starts, stops, chains):
    """Advance by tokens laid end to end; returns how many there must be, and else does nothing."""
    wanted = 0
    for row in range(starts.shape[0]):
        wanted += max(stops[row] - starts[row], 0)
    if wanted != tokens.shape[0]:
        return wanted
    place = 0
    for row in range(starts.shape[0]):
        chain = chains[row]
        for position in range(starts[row], stops[row]):
            chain = added(chain, mix64(np.int64(tokens[place]), position))
            place += 1
        chains[row] = chain
    return wanted


@kernel("int64(int64, int64, int64, int64)")
def _extend_each(state, ahead, given, count):
    """Advance each of `count` chains by a token, or none of them; see `op.one_by_one`."""
    for place in range(count):
        if load_int64(state, place) + load_int64(ahead, place) != load_int64(given, place):
            return 0
    for place in range(count):
        position, chain = load_int64(state, place), load_int64(state, count + place)
        token = load_int64(given, count + place)
        store_int64(state, count + place, added(chain, mix64(token, position)))
        store_int64(state, place, position + 1)
    return 1


def one_by_one(state, ahead):
    """What extends the chains of `state`, whose memory and that of the tokens stay where they are."""
    count = state.shape[1]
    given = np.empty(2 * count, dtype=np.int64)  # computed, and the newest tokens
    pack, room = Struct(f"{2 * count}q").pack_into, given.data
    addresses = state.ctypes.data, ahead.ctypes.data, given.ctypes.data, count
    kept = state, ahead, given, addresses  # addresses keep no memory

    def extend(computed, newest):
        pack(room, 0, *computed, *newest)
        return _extend_each(*kept[3]) == 1

    return extend
