"""Decode in Triton: one launch, each program some blocks of one request's row; the first also all else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from canary_kernels.decode.steps import Known
from canary_kernels.jit import mix64
from canary_kernels.launch import Start

if TYPE_CHECKING:
    from canary_kernels.decode.steps import DecodeMemory, DecodeStep

GIVEN, NEXT = tl.constexpr(int(Known.GIVEN)), tl.constexpr(int(Known.NEXT))
BLOCK, _WARPS = 1024, 4
# A program of so many slots reads them in the time that the launch takes; more programs than 16 do not help.
_SLOTS, _MOST_SPLITS = 4096, 16


@triton.jit(
    do_not_specialize=[
        "own_stride", "tokens_stride", "stride", "table_stride", "num_rows", "width", "last_slot", "state",
        "added", "ahead",
    ],
    do_not_specialize_on_alignment=[
        "table", "rows", "seq_lens", "input_ids", "positions", "out_slots", "window_slots", "host",
    ],
)  # fmt: skip
def decode_kernel(
    own_table, own_prefix, own_tokens, own_known, own_windows, own_slots, own_stride, tokens_stride, stride,
    table, table_stride, num_rows, width, rows, seq_lens, input_ids, positions, out_slots, window_slots,
    last_slot, host, state, added, ahead, BLOCK: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Program (request, split) copies the blocks split, split + splits, ... of the request's row.

    state: of the host's columns, a Known. last_slot: of window_slots. added: new tokens of each request, of
    which seq_lens lack `ahead`. Unless WINDOWED, own_windows,
    own_slots and window_slots are not read or written.
    """
    place = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    length = tl.load(seq_lens + place).to(tl.int64) + ahead
    if split == 0:
        digest = tl.load(host + place)
        known_len = tl.load(own_known + stride + place)
        chain = tl.load(own_known + 2 * stride + place)
        if state == GIVEN:
            known_len = tl.load(host + stride + place)
            chain = tl.load(host + 2 * stride + place)
        else:
            following = chain + mix64(digest, known_len).to(tl.int64)
            digest = tl.where(state == NEXT, chain, following)
            known_len += 1
            chain = following
        tl.store(own_prefix + place, length - added)
        for new in range(place * added, place * added + added):
            token = tl.load(input_ids + new).to(tl.int64)
            position = tl.load(positions + new).to(tl.int64)
            slot = tl.load(out_slots + new).to(tl.int64)
            tl.store(own_tokens + new, token)
            tl.store(own_tokens + tokens_stride + new, position)
            tl.store(own_tokens + 2 * tokens_stride + new, slot)
            if WINDOWED:
                kept = tl.load(window_slots + tl.where((slot >= 0) & (slot <= last_slot), slot, last_slot))
                tl.store(own_slots + new, tl.where(kept > 0, kept, -1))
        tl.store(own_known + place, digest)
        tl.store(own_known + stride + place, known_len)
        tl.store(own_known + 2 * stride + place, chain)
    known = (row >= 0) & (row < num_rows)
    stop = tl.minimum(length, width)
    held = tl.where(known, stop, 0)
    offset = tl.arange(0, BLOCK).to(tl.int64)
    for start in range(split * BLOCK, stop, tl.num_programs(1) * BLOCK):
        index = start + offset
        found = tl.load(table + row * table_stride + index, mask=index < held, other=-1)
        tl.store(own_table + place * own_stride + index, found, mask=index < stop)
        if WINDOWED:
            of = found.to(tl.int64)
            of = tl.where((of >= 0) & (of <= last_slot), of, last_slot)
            windowed = tl.load(window_slots + of, mask=index < stop, other=0)
            tl.store(own_windows + place * own_stride + index, windowed, mask=index < stop)


def keep_decode(memory: DecodeMemory, step: DecodeStep, known: Known) -> None:
    """Launch; see `op.keep_decode`."""
    table, rows, lens, ids, positions, slots, host, windows, added, ahead = step
    requests = rows.shape[0]
    if not requests:
        return
    num_rows, width = table.shape
    grid = requests, min(-(-width // _SLOTS), _MOST_SPLITS)
    types = table.dtype, rows.dtype, lens.dtype, ids.dtype, positions.dtype, slots.dtype
    own_windows, own_slots = memory.windows, memory.window_slots
    if own_windows is None or own_slots is None or windows is None:
        own_windows, own_slots, windows = memory.table, memory.prefix_lens, memory.prefix_lens
    last = windows.shape[0] - 1
    start: Start | None = memory.cache.get(types)
    if start is not None:
        start(
            grid,
            (
                table.data_ptr(), table.stride(0), num_rows, width, rows.data_ptr(), lens.data_ptr(),
                ids.data_ptr(), positions.data_ptr(), slots.data_ptr(), windows.data_ptr(), last,
                host.data_ptr(), int(known), added, ahead,
            ),
        )  # fmt: skip
        return
    kept = memory.table, memory.prefix_lens, memory.tokens, memory.known, own_windows, own_slots
    strides = memory.table.stride(0), memory.tokens.stride(0), memory.known.stride(0)
    given = table, table.stride(0), num_rows, width, rows, lens, ids, positions, slots, windows, last, host
    constants = {"BLOCK": BLOCK, "WINDOWED": memory.windows is not None}
    more = int(known), added, ahead
    compiled = decode_kernel[grid](*kept, *strides, *given, *more, **constants, num_warps=_WARPS)
    if hasattr(compiled, "packed_metadata"):
        head = (*(tensor.data_ptr() for tensor in kept), *strides)
        memory.cache[types] = Start(compiled, table.device, head, tuple(constants.values()))
