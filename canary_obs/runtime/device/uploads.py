"""Copies of a CPU's tensors on a device, made without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU's tensor. Out of pinned memory: from other memory, the host may wait for the stream."""
    if device.type == "cuda" and tensor.numel() and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, copy=True)


def uploaded_lists(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """int64 [n] each, in one copy: parts of one tensor, which lives as long as any of them."""
    sizes = [len(each) for each in lists]
    numbers = np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=sum(sizes))
    return list(torch.split_with_sizes(uploaded(torch.from_numpy(numbers), device), sizes))
