"""Copies of a CPU's tensors on a device, made without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU's tensor. Out of pinned memory: from other memory, the host may wait for the stream."""
    if device.type == "cuda" and tensor.numel() and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, copy=True)
