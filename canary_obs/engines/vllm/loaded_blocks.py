"""Loads as the canary takes them: what each block is to hold, which of its slots have arrived."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from canary_kernels.hashing import chain_of
from canary_obs.engine_api.loads import ArrivedBlocks, LoadedBlocks
from canary_obs.engines.vllm.cached_blocks import Loaded


class SentCopies(NamedTuple):
    """The copies that may be on their way into a block: folds of K and V over its first `filled` slots."""

    filled: int
    folds: tuple[tuple[int, int], ...]
    peer: str = ""  # who sent them, as in `Observer.received`


Copies = dict[tuple[str, int], SentCopies]  # by group and block
_UNKNOWN = SentCopies(0, ())


def loaded_blocks(loads: Sequence[Loaded], size: int, tokens: bytes | None) -> LoadedBlocks:
    """Blocks of one group; tokens: int32 of the request, from its first on, as far as it is loaded."""
    starts = torch.tensor([load.block for load in loads], dtype=torch.int64) * size
    slots = starts[:, None] + torch.arange(size)
    if tokens is None:
        return LoadedBlocks(slots=slots, tokens=None, positions=None, chains=None)
    ids = torch.from_numpy(np.frombuffer(tokens, dtype=np.int32).astype(np.int64))
    positions = torch.tensor([load.number for load in loads], dtype=torch.int64)[:, None] * size
    positions = positions + torch.arange(size)
    # What lies behind the last known token is not announced as arrived.
    known = torch.nn.functional.pad(ids, (0, size))
    chains = torch.nn.functional.pad(chain_of(ids), (0, size))
    places = positions.clamp(max=ids.shape[0])
    return LoadedBlocks(slots=slots, tokens=known[places], positions=positions, chains=chains[places])


def arrived_blocks(
    loads: Sequence[Loaded],
    group: tuple[str, int],
    computed: int | None,
    failed: Collection[int],
    copies: Copies,
) -> ArrivedBlocks:
    """Which slots of these blocks have arrived, of the tokens below `computed` (None = all); takes `copies`.

    group: name and block size. A block is compared with copies only if nothing else was, or will be, written
    below their end.
    """
    name, size = group
    first, stop, filled, sent = list[int](), list[int](), list[int](), list[Sequence[tuple[int, int]]]()
    peers = set[str]()
    for load in loads:
        end = load.stop if computed is None else min(load.stop, computed - load.number * size)
        if load.block in failed:
            end = load.first
        known = copies.pop((name, load.block), _UNKNOWN)
        peers.add(known.peer)
        if load.first or known.filled > (size if computed is None else end) or end <= load.first:
            known = _UNKNOWN
        first.append(load.first)
        stop.append(max(load.first, end))
        filled.append(known.filled)
        sent.append(known.folds)
    width = max(map(len, sent), default=0)
    padded = [[*folds, *[(0, 0)] * (width - len(folds))] for folds in sent]
    return ArrivedBlocks(
        first=_column(first),
        stop=_column(stop),
        filled=_column(filled),
        copies=_column([len(folds) for folds in sent]),
        sent=torch.tensor(padded, dtype=torch.int64).view(len(loads), width, 2),
        peer=peers.pop() if len(peers) == 1 else "",
    )


def _column(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
