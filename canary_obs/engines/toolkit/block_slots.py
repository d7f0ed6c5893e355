"""Slots of whole blocks, and what to do when their content is given up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.engine_api.observer import Observer


def slots_of(blocks: Sequence[int] | NDArray[np.int64], block_slots: int) -> Tensor:
    """int64 [len(blocks) * block_slots] on the CPU: all slots of these blocks."""
    starts = np.asarray(blocks, dtype=np.int64) * block_slots
    return torch.from_numpy((starts[:, None] + np.arange(block_slots)).reshape(-1))


def give_up(observer: Observer, group: str, slots: Tensor) -> None:
    """Empty the records of slots (int64 [n] on the device), after a last comparison of their bytes.

    Who reads damage that nobody has found by then would never be known.
    """
    observer.before_load(group, slots)
    observer.invalidated(group, slots)
