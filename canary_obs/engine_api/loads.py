"""Blocks whose bytes come from outside the engine: what they are to hold, and what a sender said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivedBlocks:
    """Which slots of a load's blocks have arrived, and the copies that may have been sent; on the CPU.

    A copy's fingerprints of a block are what `Observer.block_folds` said of it at the sender.
    """

    first: Tensor  # int64 [blocks]: offset of the first slot that has arrived
    stop: Tensor  # int64 [blocks]: offset behind the last one
    copies: Tensor  # int64 [blocks]: how many are known; 0 = nothing is
    filled: Tensor  # int64 [blocks]: the copies' fingerprints are those of so many slots
    sent: Tensor  # int64 [blocks, most copies, 2]: of K and V
    peer: str = ""  # who sent them, as in `Observer.received`


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBlocks:
    """Blocks of one group that a load fills: [blocks, block size] each, on the CPU.

    Tokens, positions and chains are None where the request's tokens are not known: what has arrived is
    compared with what was sent alone, and gets a baseline.
    """

    slots: Tensor  # int64
    tokens: Tensor | None  # int64
    positions: Tensor | None  # int64
    chains: Tensor | None  # int64: over all tokens before
    # What `Observer.load_ended` will be given if all of it arrives: it has less to do then. None = not known.
    expected: ArrivedBlocks | None = None
    # After these all of it lies there, so that it may be hashed before it is reported. Empty = not known.
    copied: Sequence[torch.Event] = ()
