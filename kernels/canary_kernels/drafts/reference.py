"""Drafts on the CPU, on the tensors' own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from canary_kernels.drafts.steps import DraftMemory, TargetStep

_COPIED = "prefix_lens", "extend_lens", "token_starts", "input_ids", "positions"


def keep_target(memory: DraftMemory, step: TargetStep) -> None:
    """Copy the inputs, and list the slots."""
    for name in _COPIED:
        given = getattr(step, name).numpy()
        getattr(memory, name).numpy()[: given.shape[0]] = given
    slots, out_slots, reserve = memory.slots.numpy(), step.out_slots.numpy(), memory.reserve
    tokens = out_slots.shape[0]
    slots[:tokens] = out_slots
    ends = step.prefix_lens.numpy().astype(np.int64) + step.extend_lens.numpy()
    places = np.minimum(ends[:, None] + np.arange(reserve.ahead), reserve.limit - 1)
    table, pages = step.slot_table.numpy(), places // reserve.page_size
    inside = (places >= 0) & (pages < table.shape[1])
    entries = table[np.arange(ends.shape[0])[:, None], np.where(inside, pages, 0)].astype(np.int64)
    drafted = np.where(inside, entries * reserve.page_size + places % reserve.page_size, -1)
    slots[tokens : tokens + drafted.size] = drafted.ravel()
