"""Decode on the CPU, on the tensors' own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from canary_kernels.decode.steps import Known
from canary_kernels.hashing import mix_arrays

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray
    from torch import Tensor

    from canary_kernels.decode.steps import DecodeMemory, DecodeStep


def keep_decode(memory: DecodeMemory, step: DecodeStep, known: Known) -> None:
    """Copy the inputs, and advance what is known."""
    rows, table = step.rows.numpy(), step.table.numpy()
    lens = step.seq_lens.numpy().astype(np.int64) + step.ahead
    count = rows.shape[0]
    added = count * step.added
    np.subtract(lens, step.added, out=memory.prefix_lens.numpy()[:count])
    for kept, given in zip(memory.tokens, (step.input_ids, step.positions, step.out_slots), strict=True):
        kept.numpy()[:added] = given.numpy()
    own, (num_rows, width) = memory.table.numpy(), table.shape
    for place, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        stop = min(max(length, 0), width)
        own[place, :stop] = table[row, :stop] if 0 <= row < num_rows else -1
        if memory.windows is not None and step.window_slots is not None:
            memory.windows.numpy()[place, :stop] = _of_windows(step.window_slots, own[place, :stop])
    if memory.window_slots is not None and step.window_slots is not None:
        written = _of_windows(step.window_slots, step.out_slots.numpy())
        memory.window_slots.numpy()[:added] = np.where(written > 0, written, -1)
    columns, host = memory.known.numpy()[:, :count], step.host.numpy()[:, :count]
    if known is Known.GIVEN:
        columns[:] = host
        return
    digests, lengths, chains = columns
    if known is Known.NEXT:
        digests[:] = chains
    chains += mix_arrays(host[0], lengths).view(np.int64)
    lengths += 1
    if known is Known.NEXT_BEFORE:
        digests[:] = chains


def _of_windows(window_slots: Tensor, slots: NDArray[Any]) -> NDArray[np.int64]:
    of = window_slots.numpy()
    last = of.shape[0] - 1
    found: NDArray[np.int64] = of[np.where((slots >= 0) & (slots <= last), slots, last)]
    return found
