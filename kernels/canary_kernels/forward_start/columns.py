"""Columns of a forward that come from the host, and a ring of memory that the device reads them from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# More forwards than an engine has under way, which are two, or as many as it has pipeline stages: the host
# fills a row that the device has taken.
RING_ROWS = 16
_KINDS = {torch.int32: 4, torch.int64: 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostColumns:
    """Allocated once. A forward's clock says which row of the ring is its own."""

    ring: Tensor  # int64 [RING_ROWS, 1 + 2 * max_requests] on the CPU: address of the rows, then `known`
    known: Tensor  # int64 [2, max_requests] on the device: known_lens, known_digests, as of a StepView
    rows: Tensor  # int64 [max_requests] on the device: a copy of the engine's column
    cache: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def allocate(cls, max_requests: int, device: torch.device) -> HostColumns:
        """On a GPU the ring lies in pinned memory, which kernels read."""
        shape, pinned = (RING_ROWS, 1 + 2 * max_requests), device.type == "cuda"
        made = cls(
            ring=torch.zeros(shape, dtype=torch.int64, pin_memory=pinned),
            known=torch.full((2, max_requests), -1, dtype=torch.int64, device=device),
            rows=torch.zeros(max_requests, dtype=torch.int64, device=device),
        )
        values = made.ring.numpy()
        made.cache["rows"] = [
            (row[:1], row[1:].reshape(2, max_requests)) for row in values
        ]  # views of each row of the ring
        return made

    def row(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For the host to fill before forward number `step`: [1], the address; and [2, max_requests]."""
        found: tuple[NDArray[np.int64], NDArray[np.int64]] = self.cache["rows"][step % RING_ROWS]
        return found


def address_of(column: Tensor) -> int:
    """Of an int32 or int64 column that the engine makes anew in each step, for its row of the ring.

    The lowest bit says which, as addresses are multiples of 4. Raises TypeError for another dtype.
    """
    size = _KINDS.get(column.dtype)
    if size is None:
        raise TypeError(f"a column is {column.dtype}; the rule is int32 or int64")
    return column.data_ptr() | (size == 8)
