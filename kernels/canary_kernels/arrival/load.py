"""A load that was reported complete, as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivedLoad:
    """Blocks of one group, int64 and contiguous, all on one device."""

    slots: Tensor  # [blocks, size]; -1 = left out
    old: Tensor  # [blocks, size, RECORD_WORDS]: what was known of these slots before the load
    identities: Tensor  # [blocks, size, 2]: IDENTITY and CHAIN of COMPLETE records of what they are to hold
    now: Tensor  # [blocks, size, 2]: the fingerprints of what they hold
    edges: Tensor  # [blocks, EDGE_WORDS], columns as in `Edge`
    keys: Tensor  # [size]: a block's fingerprint is the sum of its slots', each times its key
    held: Tensor  # [2]: 1 = the group has this part, of K and V
