"""Digest on the CPU: request by request, on the tensors' own memory."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from canary_kernels.digest.steps import GoOn
from canary_kernels.hashing import Integers, MixesOfNext, mix_arrays
from canary_kernels.layout import CHAIN_ANCHOR, signed

if TYPE_CHECKING:
    from canary_kernels.digest.steps import DigestMemory, InputTokens, TokenLists

_ANCHOR = signed(CHAIN_ANCHOR)


def extend_chains(tokens: Integers, ends: Integers, counts: Integers, chains: Integers) -> None:
    """Advance by host lists, all rows at once."""
    back = ends < counts
    counts[back], chains[back] = 0, _ANCHOR
    lengths = ends - counts
    rows = lengths.nonzero()[0]
    if rows.size:
        lengths = lengths[rows]
        bounds = lengths.cumsum() - lengths
        positions = np.arange(lengths.sum()) + np.repeat(counts[rows] - bounds, lengths)
        mixed = mix_arrays(tokens[np.repeat(rows, lengths), positions], positions).view(np.int64)
        chains[rows] += np.add.reduceat(mixed, bounds)
        counts[:] = ends


def extend_runs(tokens: Integers, starts: Integers, stops: Integers, chains: Integers) -> int:
    """Advance by tokens laid end to end; returns how many there must be, and else does nothing."""
    sizes = np.maximum(stops - starts, 0)
    wanted = int(sizes.sum())
    if wanted != tokens.size:
        return wanted
    ends = sizes.cumsum()
    positions = np.arange(tokens.size) - np.repeat(ends - sizes - starts, sizes)
    sums = np.concatenate((np.zeros(1, dtype=np.uint64), mix_arrays(tokens, positions).cumsum()))
    chains += (sums[ends] - sums[ends - sizes]).view(np.int64)
    return wanted


def one_by_one(state: NDArray[np.int64], ahead: NDArray[np.int64]) -> GoOn:
    """What extends the chains of `state`, all at once."""
    counts, chains = state
    pack, mixes = Struct(f"{2 * counts.size}q").pack, MixesOfNext(counts)

    def extend(computed: Sequence[int], newest: Sequence[int]) -> bool:
        before, tokens = np.frombuffer(pack(*computed, *newest), np.int64).reshape(2, -1)
        if (counts + ahead != before).any():
            return False
        np.add(counts, 1, out=counts)
        np.add(chains.view(np.uint64), mixes.mix(tokens), out=chains.view(np.uint64))
        return True

    return extend


def follow_lists(memory: DigestMemory, lists: TokenLists) -> None:
    """Advance by the engine's token lists."""
    chains, counts = memory.chains.numpy(), memory.counts.numpy()
    tokens, starts = lists.tokens.numpy(), lists.token_starts.numpy()
    rows = lists.rows.numpy()
    limit = min(chains.shape[0], tokens.shape[0], lists.computed.shape[0])
    known = (rows >= 0) & (rows < limit)
    rows = np.where(known, rows, 0)
    stops = lists.computed.numpy()[rows]
    known &= (stops >= 0) & (stops <= tokens.shape[1])
    for row, stop in zip(rows[known].tolist(), stops[known].tolist(), strict=True):
        first = int(counts[row])
        if not 0 < first <= stop:
            first, chains[row] = 0, _ANCHOR
        chains[row : row + 1] += _added(tokens[row, first:stop], first)
        counts[row] = stop
    count = rows.shape[0]
    memory.digests.numpy()[:count] = np.where(known, chains[rows], 0)
    memory.prefix_lens.numpy()[:count] = np.where(known, stops, -1)
    memory.extend_lens.numpy()[:count] = np.diff(starts[: count + 1])


def follow_inputs(memory: DigestMemory, fed: InputTokens) -> None:
    """Advance by the forward's inputs."""
    chains, counts, tails = memory.chains.numpy(), memory.counts.numpy(), memory.tails.numpy()
    places, ids = fed.places.numpy(), fed.input_ids.numpy()
    starts, prefix = fed.token_starts.tolist(), fed.prefix_lens.tolist()
    results = memory.digests.numpy()
    for place, (row, fresh, start) in enumerate(places.T.tolist()):
        first, stop = prefix[place], starts[place + 1]
        if not (0 <= row < chains.shape[0] and 0 <= starts[place] <= stop <= ids.shape[0]):
            results[place] = start if fresh else 0
            continue
        if fresh:
            chains[row] = start
        else:
            accepted = max(first - int(counts[row]), 0)
            chains[row : row + 1] += _added(tails[row, :accepted], int(counts[row]))
        results[place] = chains[row]
        sure = max(stop - tails.shape[1], starts[place])
        chains[row : row + 1] += _added(ids[starts[place] : sure], first)
        counts[row] = first + sure - starts[place]
        tails[row, : stop - sure] = ids[sure:stop]
    places[1] = 0


def _added(tokens: Integers, first: int) -> NDArray[np.int64]:
    # An array of one: NumPy's scalars warn where arrays wrap.
    mixed = mix_arrays(tokens, np.arange(first, first + tokens.shape[0]))
    added: NDArray[np.int64] = mixed.view(np.int64).sum(keepdims=True)
    return added
