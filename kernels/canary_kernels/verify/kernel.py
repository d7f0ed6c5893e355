"""Verify in Triton: programs split each request's positions, walk the slot table and read the records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from canary_kernels import layout
from canary_kernels.jit import (
    ADOPTED,
    ANCHOR,
    CHAIN,
    COMPLETE,
    COUNT_UNVERIFIED,
    NUM_REASONS,
    NUM_UNVERIFIED,
    PENDING,
    RECORD_WORDS,
    continued,
    count,
    position_of,
    report,
    slot_at,
    state_of,
)
from canary_kernels.layout import Phase

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers, RowBatch

HEAD = tl.constexpr(int(Phase.HEAD))
CHAIN_REASON = tl.constexpr(int(layout.Reason.CHAIN))
POSITION_REASON = tl.constexpr(int(layout.Reason.POSITION))
TOKEN_REASON = tl.constexpr(int(layout.Reason.TOKEN))
UNWRITTEN_REASON = tl.constexpr(int(layout.Reason.UNWRITTEN))
UNVERIFIED_ADOPTED = tl.constexpr(int(layout.Unverified.ADOPTED))
UNVERIFIED_PENDING = tl.constexpr(int(layout.Unverified.PENDING))
COUNT_RUNS = tl.constexpr(layout.COUNT_RUNS)
COUNT_VERIFIED = tl.constexpr(layout.COUNT_VERIFIED)
NO_REQUEST = tl.constexpr(layout.NO_REQUEST)

BLOCK = 256
# Enough programs to fill any GPU several times over, few enough that idle ones cost nothing.
_PROGRAMS = 4096
_MAX_SPLITS = 256


@triton.jit
def _check_block(records, num_slots, buffers, slot, position, previous, request, mask, PHASE: tl.constexpr):
    """Check one block of records; previous < 0 = nothing to link to. Returns how many were COMPLETE."""
    known = mask & (slot >= 0) & (slot < num_slots)
    record = records + slot * RECORD_WORDS
    identity = tl.load(record, mask=known, other=0)
    chain = tl.load(record + CHAIN, mask=known, other=0)
    linkable = mask & (previous >= 0) & (previous < num_slots)
    before = records + previous * RECORD_WORDS
    previous_identity = tl.load(before, mask=linkable, other=0)
    previous_chain = tl.load(before + CHAIN, mask=linkable, other=0)

    state = state_of(identity)
    complete = known & (state == COMPLETE)
    adopted = known & (state == ADOPTED)
    pending = known & (state == PENDING)
    unwritten = mask & ~complete & ~adopted
    if PHASE == HEAD:
        unwritten = unwritten & ~pending
    stored = position_of(identity)
    misplaced = complete & (stored != position)
    expected = continued(previous_identity, previous_chain, position - 1)
    expected = tl.where(position == 0, tl.full(expected.shape, ANCHOR, tl.uint64), expected)
    linked = (position > 0) & (state_of(previous_identity) == COMPLETE)
    unlinked = complete & ~misplaced & (linked | (position == 0)) & (chain.to(tl.uint64) != expected)

    if tl.max((mask & ~complete).to(tl.int32)) > 0:
        causes = buffers[0] + COUNT_UNVERIFIED + PHASE * NUM_UNVERIFIED
        count(causes, UNVERIFIED_ADOPTED, tl.sum(adopted.to(tl.int32)))
        if PHASE == HEAD:
            count(causes, UNVERIFIED_PENDING, tl.sum(pending.to(tl.int32)))
    wrong = unwritten | misplaced | unlinked
    if tl.max(wrong.to(tl.int32)) > 0:
        reason = tl.where(unwritten, UNWRITTEN_REASON, tl.where(misplaced, POSITION_REASON, CHAIN_REASON))
        wanted = tl.where(misplaced, position, expected.to(tl.int64))
        wanted = tl.where(unwritten, COMPLETE, wanted)
        found = tl.where(misplaced, stored, chain)
        found = tl.where(unwritten, tl.where(known, state, -1), found)
        report(buffers, wrong, PHASE * NUM_REASONS + reason, slot, position, request, 0, wanted, found)
    return tl.sum(complete.to(tl.int32))


@triton.jit
def _check_digest(records, num_slots, buffers, slot, last, request, digest):
    """Compare the chain after one request's last prefix token with the engine's digest."""
    known = (slot >= 0) & (slot < num_slots)
    identity = tl.load(records + slot * RECORD_WORDS, mask=known, other=0)
    chain = tl.load(records + slot * RECORD_WORDS + CHAIN, mask=known, other=0)
    found = continued(identity, chain, last).to(tl.int64)
    readable = known & (state_of(identity) == COMPLETE) & (position_of(identity) == last)
    wrong = readable & (found != digest)
    if wrong:
        report(buffers, wrong, HEAD * NUM_REASONS + TOKEN_REASON, slot, last, request, 0, digest, found)


@triton.jit(
    do_not_specialize=["num_slots", "lane_rows", "table_stride", "num_rows", "capacity", "num_requests"],
    do_not_specialize_on_alignment=["table", "rows", "starts", "prefix_lens", "extend_lens", "digests"],
)
def rows_kernel(
    records, counters, violations, clock, num_slots, lane_rows,
    table, table_stride, num_rows, capacity,
    rows, starts, prefix_lens, extend_lens, digests, num_requests,
    PHASE: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_DIGESTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request, split) checks the blocks split, split + splits, ... of the request's positions."""
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    buffers = (counters, violations, clock, lane_rows)
    if (request == 0) & (split == 0):
        tl.atomic_add(counters + COUNT_RUNS + PHASE, 1)
    if request < num_requests:
        row = tl.load(rows + request).to(tl.int64)
        if (row >= 0) & (row < num_rows):
            start = tl.maximum(tl.load(starts + request).to(tl.int64), 0)
            prefix = tl.load(prefix_lens + request).to(tl.int64)
            length = prefix
            if PHASE != HEAD:
                length += tl.load(extend_lens + request).to(tl.int64)
            length = tl.minimum(length, capacity)
            verified = 0
            for first in range(start + split * BLOCK, length, tl.num_programs(1) * BLOCK):
                position = first + tl.arange(0, BLOCK).to(tl.int64)
                mask = position < length
                slot = slot_at(table, table_stride, row, position, PAGE_SIZE, mask)
                previous = slot_at(
                    table, table_stride, row, position - 1, PAGE_SIZE, mask & (position > start)
                )
                verified += _check_block(
                    records, num_slots, buffers, slot, position, previous, request, mask, PHASE
                )
            if verified > 0:
                tl.atomic_add(counters + COUNT_VERIFIED + PHASE, verified.to(tl.int64))
            if HAS_DIGESTS:
                last = tl.minimum(prefix, capacity) - 1
                if (split == 0) & (last >= 0):
                    slot = slot_at(table, table_stride, row, last, PAGE_SIZE, last >= 0)
                    digest = tl.load(digests + request).to(tl.int64)
                    _check_digest(records, num_slots, buffers, slot, last, request, digest)


@triton.jit(
    do_not_specialize=["num_slots", "lane_rows", "num_listed"],
    do_not_specialize_on_alignment=["slots", "positions", "previous_slots"],
)
def list_kernel(
    records, counters, violations, clock, num_slots, lane_rows,
    slots, positions, previous_slots, num_listed,
    PHASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i checks the i-th block of a list."""
    program = tl.program_id(0).to(tl.int64)
    buffers = (counters, violations, clock, lane_rows)
    if program == 0:
        tl.atomic_add(counters + COUNT_RUNS + PHASE, 1)
    index = program * BLOCK + tl.arange(0, BLOCK)
    listed = index < num_listed
    slot = tl.load(slots + index, mask=listed, other=-1).to(tl.int64)
    position = tl.load(positions + index, mask=listed, other=0).to(tl.int64)
    previous = tl.load(previous_slots + index, mask=listed, other=-1).to(tl.int64)
    mask = listed & (slot >= 0)
    verified = _check_block(records, num_slots, buffers, slot, position, previous, NO_REQUEST, mask, PHASE)
    count(counters, COUNT_VERIFIED + PHASE, verified)


def verify_rows(buffers: GroupBuffers, batch: RowBatch, phase: Phase) -> None:
    """Launch the row check; see `op.verify_rows`."""
    table, requests = batch.slot_table, batch.rows.shape[0]
    has_digests = phase is Phase.HEAD and batch.digests is not None
    capacity = table.shape[1] * batch.page_size
    splits = max(1, min(_MAX_SPLITS, _PROGRAMS // max(1, requests), triton.cdiv(capacity, BLOCK)))
    rows_kernel[(max(1, requests), splits)](
        buffers.records, buffers.counters, buffers.violations, buffers.clock,
        buffers.num_slots, buffers.violations.shape[1],
        table, table.stride(0), table.shape[0], capacity,
        batch.rows, batch.starts, batch.prefix_lens, batch.extend_lens,
        batch.digests if has_digests else batch.rows, requests,
        PHASE=int(phase), PAGE_SIZE=batch.page_size, HAS_DIGESTS=has_digests, BLOCK=BLOCK,
    )  # fmt: skip


def verify_list(
    buffers: GroupBuffers, slots: Tensor, positions: Tensor, previous: Tensor, phase: Phase
) -> None:
    """Launch the list check; see `op.verify_list`."""
    listed = slots.shape[0]
    list_kernel[(max(1, triton.cdiv(listed, BLOCK)),)](
        buffers.records, buffers.counters, buffers.violations, buffers.clock,
        buffers.num_slots, buffers.violations.shape[1],
        slots, positions, previous, listed,
        PHASE=int(phase), BLOCK=BLOCK,
    )  # fmt: skip
