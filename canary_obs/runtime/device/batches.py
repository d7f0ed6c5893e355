"""What is kept from one forward to the next of a group's batch: objects that need not be made again."""

from __future__ import annotations

import operator
from collections import OrderedDict

import torch
from torch import Tensor

from canary_kernels.buffers import RowBatch

BATCHES_KEPT = 64  # of one group


class FirstPositions:
    """First position to check of each request: 0, or the first of its window. Reuses its memory."""

    def __init__(self, window: int | None, device: torch.device) -> None:
        self._window = window
        self._memory = torch.zeros(1024, dtype=torch.int32, device=device)
        self._views: dict[int, Tensor] = {}  # of the memory, by length

    def of(self, prefix_lens: Tensor) -> Tensor:
        """int32 [n] for prefix_lens (integers [n]): the result of `compute`. Same n, same tensor."""
        count = prefix_lens.shape[0]
        starts = self._views.get(count)
        if starts is None:
            if count > self._memory.shape[0]:
                self._memory = torch.zeros(2 * count, dtype=torch.int32, device=self._memory.device)
            starts = self._views[count] = self._memory[:count]
        return starts

    def compute(self, prefix_lens: Tensor) -> Tensor:
        """The same, computed now; valid until the next call."""
        starts = self.of(prefix_lens)
        if self._window is not None:
            torch.sub(prefix_lens, self._window - 1, out=starts)
            starts.clamp_(min=0)
        return starts


Columns = tuple[Tensor | None, ...]


class BatchCache:
    """The last batches of a group: an engine that shows the same tensors again gets the same batch."""

    def __init__(self) -> None:
        self._columns: Columns = ()  # of the last one
        self._batch: RowBatch | None = None
        # As long as the columns are held, no other tensors have their ids.
        self._kept: OrderedDict[tuple[int, ...], tuple[Columns, RowBatch]] = OrderedDict()

    def get(self, columns: Columns) -> RowBatch | None:
        """The batch if it was made of these tensor objects, whatever they contain by now; else None."""
        if len(columns) == len(self._columns) and all(map(operator.is_, columns, self._columns)):
            return self._batch
        found = self._kept.get(tuple(map(id, columns)))
        return None if found is None else self._show(*found)

    def put(self, columns: Columns, batch: RowBatch) -> RowBatch:
        """Keep a batch, and forget the one whose last use is longest ago; returns it."""
        self._kept[tuple(map(id, columns))] = columns, batch
        if len(self._kept) > BATCHES_KEPT:
            self._kept.popitem(last=False)
        return self._show(columns, batch)

    def _show(self, columns: Columns, batch: RowBatch) -> RowBatch:
        self._columns, self._batch = columns, batch
        self._kept.move_to_end(tuple(map(id, columns)))
        return batch
