"""What is known of the copies on their way into blocks, as a load that ends takes it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from canary_obs.copy_records.stored_copies import Fold
from canary_obs.engines.vllm.sent_copies import Copies

GROUPS = "full", "swa", "draft", "other", "state"
BLOCKS = 32  # of a pool


class Taken(NamedTuple):
    """The copies of one block: folds of K and V over its first `filled` slots."""

    filled: int
    folds: tuple[Fold, ...]
    peer: str = ""


def taken(copies: Copies) -> dict[tuple[str, int], Taken]:
    """By group and block, of all blocks of which anything was said."""
    found = {}
    for group in GROUPS:
        for block in range(BLOCKS):
            known = copies.take(group, np.array([block]))
            if known.filled[0]:
                folds = tuple((k, v) for k, v in known.folds[0, : known.counts[0]].tolist())
                found[group, block] = Taken(int(known.filled[0]), folds, known.peer)
    return found
