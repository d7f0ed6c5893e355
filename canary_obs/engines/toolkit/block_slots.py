"""Slots of whole blocks, and what to do when their content is given up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from canary_obs.engine_api.observer import Observer


def slots_of(blocks: Sequence[int], block_slots: int) -> Tensor:
    """int64 [len(blocks) * block_slots] on the CPU: all slots of these blocks."""
    starts = torch.tensor(blocks, dtype=torch.int64) * block_slots
    return (starts[:, None] + torch.arange(block_slots)).flatten()


def give_up(observer: Observer, group: str, slots: Tensor) -> None:
    """Empty the records of slots (int64 [n] on the device), after a last comparison of their bytes.

    Who reads damage that nobody has found by then would never be known.
    """
    observer.before_load(group, slots)
    observer.invalidated(group, slots)
