"""What is kept from one forward to the next of a group's batch: objects that need not be made again."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from canary_kernels.buffers import RowBatch


class FirstPositions:
    """First position to check of each request: 0, or the first of its window. Reuses its memory."""

    def __init__(self, window: int | None, device: torch.device) -> None:
        self._window = window
        self._memory = torch.zeros(1024, dtype=torch.int32, device=device)
        self._views: dict[int, Tensor] = {}  # of the memory, by length

    def compute(self, prefix_lens: Tensor) -> Tensor:
        """int32 [n] for prefix_lens (integers [n]); valid until the next call. Same n, same tensor."""
        count = prefix_lens.shape[0]
        starts = self._views.get(count)
        if starts is None:
            if count > self._memory.shape[0]:
                self._memory = torch.zeros(2 * count, dtype=torch.int32, device=self._memory.device)
            starts = self._views[count] = self._memory[:count]
        if self._window is not None:
            torch.sub(prefix_lens, self._window - 1, out=starts)
            starts.clamp_(min=0)
        return starts


class BatchCache:
    """The last batch of a group: an engine that shows the same tensors again gets the same batch."""

    def __init__(self) -> None:
        self._columns: tuple[Tensor | None, ...] = ()
        self._batch: RowBatch | None = None

    def get(self, columns: tuple[Tensor | None, ...]) -> RowBatch | None:
        """The batch if it was made of these tensor objects, whatever they contain by now; else None."""
        if len(columns) == len(self._columns) and all(map(operator.is_, columns, self._columns)):
            return self._batch
        return None

    def put(self, columns: tuple[Tensor | None, ...], batch: RowBatch) -> RowBatch:
        """Replace the cached batch; returns the new one."""
        self._columns, self._batch = columns, batch
        return batch
