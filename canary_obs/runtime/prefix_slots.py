"""The slots of a batch's prefixes, listed by the host."""

from __future__ import annotations

import torch
from torch import Tensor

from canary_kernels.buffers import RowBatch


def prefix_slots(batch: RowBatch) -> Tensor:
    """int64 [n]: the prefix slots of a batch, each once. Waits for the device: for `prefix_data` only."""
    used = []
    num_rows, capacity = batch.slot_table.shape[0], batch.slot_table.shape[1] * batch.page_size
    for row, first, length in zip(
        batch.rows.tolist(), batch.starts.tolist(), batch.prefix_lens.tolist(), strict=True
    ):
        start, stop = max(first, 0), min(length, capacity)
        if 0 <= row < num_rows and stop > start:
            positions = torch.arange(start, stop, device=batch.slot_table.device)
            pages = batch.slot_table[row, positions // batch.page_size].to(torch.int64)
            used.append(pages * batch.page_size + positions % batch.page_size)
    if not used:
        return torch.empty(0, dtype=torch.int64, device=batch.slot_table.device)
    return torch.cat(used).unique()  # type: ignore[no-any-return, no-untyped-call]
