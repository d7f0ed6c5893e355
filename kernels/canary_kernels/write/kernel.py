"""Write in Triton: each chunk's program sums over the chunks before it to find where its chain starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from canary_kernels import layout
from canary_kernels.jit import (
    ANCHOR,
    CHAIN,
    COMPLETE,
    FINGERPRINT_K,
    FINGERPRINT_V,
    NUM_REASONS,
    PENDING,
    RECORD_WORDS,
    STATE_BITS,
    continued,
    count,
    mix64,
    report,
    slot_at,
    state_of,
)
from canary_kernels.launch import columns_of, prepare

if TYPE_CHECKING:
    from canary_kernels.buffers import GroupBuffers, RowBatch
    from canary_kernels.launch import Start

HEAD = tl.constexpr(int(layout.Phase.HEAD))
TOKEN_REASON = tl.constexpr(int(layout.Reason.WRITE_TOKEN))
POSITION_REASON = tl.constexpr(int(layout.Reason.WRITE_POSITION))
COUNT_WRITTEN = tl.constexpr(layout.COUNT_WRITTEN)
COUNT_WRITE_RUNS = tl.constexpr(layout.COUNT_WRITE_RUNS)
LOW_WORD = tl.constexpr((1 << 32) - 1)

_DECODE_TOKENS = 8  # at most so many per request, drafts included
# (tokens per chunk, tokens summed at once before it, warps): few new tokens per request, or many.
_SHORT, _LONG = (64, 64, 2), (256, 4096, 8)
_PROGRAMS = 8192


@triton.jit
def _chain_start(records, num_slots, slot, last):
    """uint64: the chain after the record at the last prefix position; the anchor for an unknown slot."""
    known = (slot >= 0) & (slot < num_slots)
    identity = tl.load(records + slot * RECORD_WORDS, mask=known, other=0)
    chain = tl.load(records + slot * RECORD_WORDS + CHAIN, mask=known, other=0)
    after = continued(identity, chain, last)
    return tl.where(known, after, tl.full(after.shape, ANCHOR, tl.uint64))


@triton.jit
def _store_block(records, num_slots, slot, token, position, chain, mask):
    """Write PENDING records; returns how many. Fingerprints of another COMPLETE token stay as its witness."""
    known = mask & (slot >= 0) & (slot < num_slots)
    record = records + slot * RECORD_WORDS
    old = tl.load(record, mask=known, other=0)
    identity = (token & LOW_WORD) | (((position << STATE_BITS) | PENDING) << 32)
    differs = ((old ^ identity) & LOW_WORD) != 0
    differs = differs | (((old ^ identity) >> (32 + STATE_BITS)) != 0)
    witness = known & differs & (state_of(old) == COMPLETE)
    tl.store(record, identity, mask=known)
    tl.store(record + CHAIN, chain, mask=known)
    tl.store(record + FINGERPRINT_K, token * 0, mask=known & ~witness)
    tl.store(record + FINGERPRINT_V, token * 0, mask=known & ~witness)
    return tl.sum(known.to(tl.int32))


@triton.jit
def _check_inputs(buffers, slot, position, given, token, wanted, request, mask, HAS_EXPECTED: tl.constexpr):
    """Compare the model's inputs with the positions that continue the chain and the oracle's tokens."""
    wrong = mask & (given != position)
    if tl.max(wrong.to(tl.int32)) > 0:
        lane = HEAD * NUM_REASONS + POSITION_REASON
        report(buffers, wrong, lane, slot, position, request, 0, position, given)
    if HAS_EXPECTED:
        wrong = mask & (wanted >= 0) & (wanted != token)
        if tl.max(wrong.to(tl.int32)) > 0:
            lane = HEAD * NUM_REASONS + TOKEN_REASON
            report(buffers, wrong, lane, slot, position, request, 0, wanted, token)


@triton.jit(
    do_not_specialize=["num_slots", "lane_rows", "table_stride", "num_rows", "capacity", "num_requests"],
    do_not_specialize_on_alignment=[
        "table", "rows", "starts", "prefix_lens", "extend_lens", "token_starts", "digests",
        "input_ids", "positions", "out_slots", "expected_ids",
    ],
)  # fmt: skip
def write_kernel(
    records, counters, violations, clock, num_slots, lane_rows,
    table, table_stride, num_rows, capacity,
    rows, starts, prefix_lens, extend_lens, token_starts, digests, num_requests,
    input_ids, positions, out_slots, expected_ids,
    PAGE_SIZE: tl.constexpr, HAS_DIGESTS: tl.constexpr, HAS_EXPECTED: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (request, split) writes the chunks split, split + splits, ... of the request's new tokens."""
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    buffers = (counters, violations, clock, lane_rows)
    if (request == 0) & (split == 0):
        tl.atomic_add(counters + COUNT_WRITE_RUNS, 1, sem="relaxed")
    # Loaded ahead of the branches: one wait, not one after another.
    real = request < num_requests
    row = tl.load(rows + request, mask=real, other=-1).to(tl.int64)
    extend = tl.load(extend_lens + request, mask=real, other=0).to(tl.int64)
    prefix = tl.load(prefix_lens + request, mask=real, other=0).to(tl.int64)
    first_token = tl.load(token_starts + request, mask=real, other=0).to(tl.int64)
    if (row >= 0) & (row < num_rows) & (split * BLOCK < extend):
        last = prefix - 1
        if HAS_DIGESTS:
            start = tl.load(digests + request).to(tl.int64).to(tl.uint64)
            start = tl.where(prefix > 0, start, tl.full(start.shape, ANCHOR, tl.uint64))
        else:
            inside = (last >= 0) & (last < capacity)
            last_slot = slot_at(table, table_stride, row, last, PAGE_SIZE, inside)
            start = _chain_start(records, num_slots, last_slot, last)
        offset = tl.arange(0, BLOCK).to(tl.int64)
        wide_offset = tl.arange(0, WIDE).to(tl.int64)
        before = tl.zeros([WIDE], tl.uint64)
        summed = split * 0
        written = 0
        for first in range(split * BLOCK, extend, tl.num_programs(1) * BLOCK):
            index = first + offset
            mask = index < extend
            token = tl.load(input_ids + first_token + index, mask=mask, other=0)
            token = token.to(tl.int32).to(tl.int64)
            slot = tl.load(out_slots + first_token + index, mask=mask, other=-1).to(tl.int64)
            given = tl.load(positions + first_token + index, mask=mask, other=0).to(tl.int64)
            wanted = token
            if HAS_EXPECTED:
                wanted = tl.load(expected_ids + first_token + index, mask=mask, other=-1).to(tl.int64)
            for wide in range(summed, first, WIDE):
                earlier = wide + wide_offset
                passing = earlier < first
                passed = tl.load(input_ids + first_token + earlier, mask=passing, other=0)
                mixed_before = mix64(passed.to(tl.int32).to(tl.int64), prefix + earlier)
                before += tl.where(passing, mixed_before, tl.zeros([WIDE], tl.uint64))
            summed = first
            position = prefix + index
            mixed = tl.where(mask, mix64(token, position), tl.zeros([BLOCK], tl.uint64)).to(tl.int64)
            chain = tl.cumsum(mixed) - mixed + tl.sum(before.to(tl.int64)) + start.to(tl.int64)
            _check_inputs(buffers, slot, position, given, token, wanted, request, mask, HAS_EXPECTED)
            written += _store_block(records, num_slots, slot, token, position, chain, mask)
        count(counters, COUNT_WRITTEN, written)


def write_identities(buffers: GroupBuffers, batch: RowBatch) -> None:
    """Launch the write; see `op.write_identities`."""
    columns = columns_of(batch)
    requests, tokens = batch.rows.shape[0], batch.input_ids.shape[0]
    shape = _LONG if tokens > _DECODE_TOKENS * requests else _SHORT
    block, wide, warps = shape
    # Any one request may hold all tokens: lengths are known on the device only.
    grid = max(1, requests), max(1, min(_PROGRAMS // max(1, requests), -(-tokens // block)))
    key = "write_kernel", shape, columns.kind
    start: Start | None = buffers.memo.get(key)
    if start is not None:
        start(grid, columns.addresses)
        return
    constants = {
        "PAGE_SIZE": batch.page_size, "HAS_DIGESTS": batch.digests is not None,
        "HAS_EXPECTED": batch.expected_ids is not None, "BLOCK": block, "WIDE": wide,
    }  # fmt: skip
    given = columns.tensors
    buffers.memo[key] = prepare(write_kernel, buffers, grid, given, {**constants, "num_warps": warps})
