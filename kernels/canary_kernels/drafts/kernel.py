"""Drafts in Triton: one launch, each program a block of tokens, of requests and of slots drafted them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from canary_kernels.launch import Start

if TYPE_CHECKING:
    from collections.abc import Callable

    from canary_kernels.drafts.steps import DraftMemory, TargetStep

_BLOCK, _WARPS = 256, 4


@triton.jit
def _copy(source, destination, index, mask):
    tl.store(destination + index, tl.load(source + index, mask=mask, other=0), mask=mask)


@triton.jit(
    do_not_specialize=["table_stride", "width", "num_requests", "num_tokens"],
    do_not_specialize_on_alignment=[
        "prefix_lens", "extend_lens", "token_starts", "input_ids", "positions", "out_slots", "table",
    ],
)  # fmt: skip
def keep_kernel(
    kept_prefix, kept_extend, kept_starts, kept_ids, kept_positions, kept_slots,
    prefix_lens, extend_lens, token_starts, input_ids, positions, out_slots,
    table, table_stride, width, num_requests, num_tokens,
    AHEAD: tl.constexpr, LIMIT: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i does the i-th block of everything."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    new = index < num_tokens
    _copy(input_ids, kept_ids, index, new)
    _copy(positions, kept_positions, index, new)
    tl.store(kept_slots + index, tl.load(out_slots + index, mask=new, other=-1).to(tl.int64), mask=new)
    _copy(prefix_lens, kept_prefix, index, index < num_requests)
    _copy(extend_lens, kept_extend, index, index < num_requests)
    _copy(token_starts, kept_starts, index, index <= num_requests)
    if AHEAD > 0:
        request = index // AHEAD
        real = request < num_requests
        end = tl.load(prefix_lens + request, mask=real, other=0).to(tl.int64)
        end += tl.load(extend_lens + request, mask=real, other=0).to(tl.int64)
        place = tl.minimum(end + index % AHEAD, LIMIT - 1)
        page = place // PAGE_SIZE
        inside = real & (place >= 0) & (page < width)
        entry = tl.load(table + request * table_stride + page, mask=inside, other=0).to(tl.int64)
        slot = tl.where(inside, entry * PAGE_SIZE + place % PAGE_SIZE, -1)
        tl.store(kept_slots + num_tokens + index, slot, mask=real)


def keep_target(memory: DraftMemory, step: TargetStep) -> None:
    """Launch; see `op.keep_target`."""
    requests, tokens = step.prefix_lens.shape[0], step.input_ids.shape[0]
    reserve, table = memory.reserve, step.slot_table
    grid = triton.cdiv(max(tokens, requests * reserve.ahead, requests + 1), _BLOCK), 1
    tensors = (
        step.prefix_lens, step.extend_lens, step.token_starts, step.input_ids, step.positions,
        step.out_slots, table,
    )  # fmt: skip
    sizes = table.stride(0), table.shape[1], requests, tokens
    types = tuple(tensor.dtype for tensor in tensors)
    start: Callable[..., None] | None = memory.cache.get(types)
    if start is not None:
        start(grid, (*(tensor.data_ptr() for tensor in tensors), *sizes))
        return
    kept = (
        memory.prefix_lens, memory.extend_lens, memory.token_starts, memory.input_ids, memory.positions,
        memory.slots,
    )  # fmt: skip
    constants = {
        "AHEAD": reserve.ahead,
        "LIMIT": reserve.limit,
        "PAGE_SIZE": reserve.page_size,
        "BLOCK": _BLOCK,
    }
    compiled = keep_kernel[grid](*kept, *tensors, *sizes, **constants, num_warps=_WARPS)
    if hasattr(compiled, "packed_metadata"):
        head = tuple(tensor.data_ptr() for tensor in kept)
        memory.cache[types] = Start(compiled, memory.slots.device, head, tuple(constants.values()))
