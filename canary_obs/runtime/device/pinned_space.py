"""Pinned memory for copies between host and device, allocated once."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

_ALIGNMENT = 16


class PinnedSpace:
    """Handed out piece by piece, and given back in the same order.

    To allocate pinned memory may wait for the device, and torch does so while all that it has is in use.
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        """`size`: bytes, of all that is handed out at once."""
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._in_use: deque[tuple[int, int]] = deque()  # from, up to; oldest first
        self._next = 0

    def take(self, like: Tensor) -> Tensor | None:
        """A piece with the shape and the dtype of a tensor on any device; None = there is no room now."""
        size, start = self._memory.shape[0], -(-self._next // _ALIGNMENT) * _ALIGNMENT
        if start + like.nbytes > size:
            start = 0
        stop = start + like.nbytes
        if stop > size or any(start < last and first < stop for first, last in self._in_use):
            return None
        self._in_use.append((start, stop))
        self._next = stop
        return self._memory[start:stop].view(like.dtype).view(like.shape)

    def give_back(self) -> None:
        """The piece that was handed out first."""
        self._in_use.popleft()
