"""Reset in Triton: records become empty, or adopted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from canary_kernels.jit import IDENTITY, RECORD_WORDS, sealed
from canary_kernels.launch import prepare

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers
    from canary_kernels.launch import Start
    from canary_kernels.layout import RecordState

BLOCK = 256  # slots of one program


@triton.jit(
    do_not_specialize=["num_slots", "lane_rows", "num_listed", "state"],
    do_not_specialize_on_alignment=["slots"],
)
def reset_kernel(
    records, counters, violations, clock, num_slots, lane_rows,
    slots, num_listed, state, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i resets the i-th block of a list."""
    word = tl.arange(0, BLOCK * RECORD_WORDS)
    index = tl.program_id(0).to(tl.int64) * BLOCK + word // RECORD_WORDS
    slot = tl.load(slots + index, mask=index < num_listed, other=-1).to(tl.int64)
    known = (slot >= 0) & (slot < num_slots)
    identity = state.to(tl.int64) << 32
    value = tl.where(word % RECORD_WORDS == IDENTITY, sealed(identity, identity * 0), 0)
    tl.store(records + slot * RECORD_WORDS + word % RECORD_WORDS, value, mask=known)


def reset_slots(buffers: GroupBuffers, slots: Tensor, state: RecordState) -> None:
    """Launch the reset; see `op.reset_slots`."""
    listed = slots.shape[0]
    grid = max(1, triton.cdiv(listed, BLOCK)), 1
    key = "reset_kernel", slots.dtype
    start: Start | None = buffers.cache.get(key)
    if start is not None:
        start(grid, (slots.data_ptr(), listed, int(state)))
        return
    given = slots, listed, int(state)
    buffers.cache[key] = prepare(reset_kernel, buffers, grid, given, {"BLOCK": BLOCK})
