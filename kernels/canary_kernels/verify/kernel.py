"""Verify in Triton: programs split each request's positions, walk the slot table and read the records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from canary_kernels import layout
from canary_kernels.jit import (
    ADOPTED,
    ANCHOR,
    AWAITED,
    BASELINE,
    COMPLETE,
    COUNT_UNVERIFIED,
    EMPTY,
    NUM_REASONS,
    NUM_UNVERIFIED,
    PENDING,
    continued,
    count,
    flaw_of,
    identity_holds,
    load_record,
    position_of,
    report,
    slot_at,
    state_of,
)
from canary_kernels.launch import NUM_ROW_COLUMNS, columns_of, prepare
from canary_kernels.layout import Phase
from canary_kernels.verify.digests import TOKEN_REASON, check_digest, check_known

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers, RowBatch
    from canary_kernels.launch import Start

HEAD = tl.constexpr(int(Phase.HEAD))
CHAIN_REASON = tl.constexpr(int(layout.Reason.CHAIN))
POSITION_REASON = tl.constexpr(int(layout.Reason.POSITION))
UNWRITTEN_REASON = tl.constexpr(int(layout.Reason.UNWRITTEN))
RECORD_REASON = tl.constexpr(int(layout.Reason.RECORD))
UNVERIFIED_BASELINE = tl.constexpr(int(layout.Unverified.BASELINE))
UNVERIFIED_ADOPTED = tl.constexpr(int(layout.Unverified.ADOPTED))
UNVERIFIED_PENDING = tl.constexpr(int(layout.Unverified.PENDING))
COUNT_RUNS = tl.constexpr(layout.COUNT_RUNS)
COUNT_VERIFIED = tl.constexpr(layout.COUNT_VERIFIED)
KNOWN_LAG = tl.constexpr(layout.KNOWN_LAG)
NO_REQUEST = tl.constexpr(layout.NO_REQUEST)

BLOCK = 128
_WARPS = 4
# Enough programs to fill a GPU, few enough that their starts cost little (H200: 8 per multiprocessor).
_PROGRAMS = 1024
# Blocks that one program takes at most, so that a long request among many is not left to one program.
_MAX_ROUNDS = 64

# In a block's sum: more than all its sound records together.
BAD = tl.constexpr(1 << 16)


@triton.jit
def _judge(buffers, place, record, expected, linked, mask, PHASE: tl.constexpr):
    """Count and report what is wrong with records where mask holds; returns how many were COMPLETE.

    place = (slot, position, request), record = (known, identity, chain), linked = expected may be compared.
    """
    slot, position, request = place
    known, identity, chain = record
    known = known & mask
    flaw = flaw_of(identity, chain)
    damaged = known & (flaw != 0)
    state = tl.where(damaged, -1, state_of(identity))
    complete = known & (state == COMPLETE)
    adopted = known & (state == ADOPTED)
    baseline = known & (state == BASELINE)
    pending = known & (state == PENDING)
    if PHASE == HEAD:  # this very forward may bring the bytes
        pending = pending | (known & (state == AWAITED))
    else:
        adopted = adopted | (known & (state == AWAITED))
    unwritten = mask & ~complete & ~adopted & ~baseline & ~damaged
    if PHASE == HEAD:
        unwritten = unwritten & ~pending
    stored = position_of(identity)
    misplaced = complete & (stored != position)
    unlinked = complete & ~misplaced & linked & (chain.to(tl.uint64) != expected)
    causes = buffers[0] + COUNT_UNVERIFIED + PHASE * NUM_UNVERIFIED
    count(causes, UNVERIFIED_ADOPTED, tl.sum(adopted.to(tl.int32)))
    count(causes, UNVERIFIED_BASELINE, tl.sum(baseline.to(tl.int32)))
    if PHASE == HEAD:
        count(causes, UNVERIFIED_PENDING, tl.sum(pending.to(tl.int32)))
    wrong = unwritten | misplaced | unlinked | damaged
    if tl.max(wrong.to(tl.int32)) > 0:
        reason = tl.where(unwritten, UNWRITTEN_REASON, tl.where(misplaced, POSITION_REASON, CHAIN_REASON))
        wanted = tl.where(misplaced, position, expected.to(tl.int64))
        wanted = tl.where(unwritten, COMPLETE, wanted)
        found = tl.where(misplaced, stored, chain)
        found = tl.where(unwritten, tl.where(known, state, -1), found)
        reason = tl.where(damaged, RECORD_REASON, reason)
        wanted, found = tl.where(damaged, 0, wanted), tl.where(damaged, flaw, found)
        report(buffers, wrong, PHASE * NUM_REASONS + reason, slot, position, request, 0, wanted, found)
    return tl.sum(complete.to(tl.int32))


@triton.jit
def _expected(position, previous):
    """uint64: the chain a record must hold, given the chain after the slot before it."""
    return tl.where(position == 0, tl.full(previous.shape, ANCHOR, tl.uint64), previous)


@triton.jit
def _check_block(
    records, num_slots, buffers, slot, position, request, digest, digested, start, length,
    PHASE: tl.constexpr, HAS_DIGESTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Check a block's records but the first, which links the second. Returns how many were COMPLETE.

    digested = the position after which the chain must be the digest; -1 = none.
    """
    lane = tl.arange(0, BLOCK)
    held = (position >= start) & (position < length)
    checked = held & (lane > 0)
    known = held & (slot >= 0) & (slot < num_slots)
    identity, chain = load_record(records, slot, known)
    after = continued(identity, chain, position)
    before = tl.maximum(lane - 1, 0)
    expected = _expected(position, tl.gather(after, before, 0))
    tied = (lane > 0) & ((position > start) | (position == 0))
    intact = flaw_of(identity, chain) == 0
    sound = identity_holds(identity, position, COMPLETE) & intact
    sound = sound & (~tied | (chain.to(tl.uint64) == expected))
    if HAS_DIGESTS:
        last = checked & (position == digested)
        differs = last & (after.to(tl.int64) != digest)
        sound = sound & ~differs
    total = tl.sum(tl.where(held & ~sound, BAD, checked.to(tl.int32)))
    if total >= BAD:
        state = tl.where(known & intact, state_of(identity), EMPTY)
        linked = (position == 0) | ((position > start) & (tl.gather(state, before, 0) == COMPLETE))
        place = (slot, position, request)
        total = _judge(buffers, place, (known, identity, chain), expected, linked, checked, PHASE)
        if HAS_DIGESTS:
            wrong = differs & known & (state == COMPLETE) & (position_of(identity) == position)
            if tl.max(wrong.to(tl.int32)) > 0:
                found = after.to(tl.int64)
                lane_of_log = PHASE * NUM_REASONS + TOKEN_REASON
                report(buffers, wrong, lane_of_log, slot, position, request, 0, digest, found)
    return total


@triton.jit(
    do_not_specialize=["num_slots", "lane_rows", "table_stride", "num_rows", "capacity", "num_requests"],
    do_not_specialize_on_alignment=[
        "table", "rows", "starts", "prefix_lens", "extend_lens", "token_starts", "digests", "known_lens",
        "known_digests",
    ],
)  # fmt: skip
def rows_kernel(
    records, counters, violations, clock, num_slots, lane_rows,
    table, table_stride, num_rows, capacity,
    rows, starts, prefix_lens, extend_lens, token_starts, digests, known_lens, known_digests, num_requests,
    PHASE: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_DIGESTS: tl.constexpr, HAS_KNOWN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request, split) checks the blocks split, split + splits, ... of the request's positions."""
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    buffers = (counters, violations, clock, lane_rows)
    if (request == 0) & (split == 0):
        tl.atomic_add(counters + COUNT_RUNS + PHASE, 1, sem="relaxed")
    # Loaded ahead of the branches: one wait, not one after another.
    real = request < num_requests
    row = tl.load(rows + request, mask=real, other=-1).to(tl.int64)
    start = tl.maximum(tl.load(starts + request, mask=real, other=0).to(tl.int64), 0)
    length = tl.load(prefix_lens + request, mask=real, other=0).to(tl.int64)
    # At the tail the digest is asked for where a request adds nothing: its prefix may have been PENDING.
    extend = length * 0
    if PHASE != HEAD:
        extend = tl.load(extend_lens + request, mask=real, other=0).to(tl.int64)
        length += extend
    digest = length * 0
    if HAS_DIGESTS:
        digest = tl.load(digests + request, mask=real, other=0).to(tl.int64)
    if HAS_KNOWN:
        known_len = tl.load(known_lens + request, mask=real, other=0).to(tl.int64)
        known_digest = tl.load(known_digests + request, mask=real, other=0).to(tl.int64)
    prefix = length - extend
    length = tl.minimum(length, capacity)
    digested = tl.where(extend == 0, length - 1, -1)
    # Blocks overlap by the record that links the next one.
    STEP: tl.constexpr = BLOCK - 1
    if (row >= 0) & (row < num_rows):
        verified = 0
        for first in range(start + split * STEP, length, tl.num_programs(1) * STEP):
            position = first - 1 + tl.arange(0, BLOCK).to(tl.int64)
            mask = (position >= start) & (position < length)
            slot = slot_at(table, table_stride, row, position, PAGE_SIZE, mask)
            verified += _check_block(
                records, num_slots, buffers, slot, position, request, digest, digested, start, length,
                PHASE, HAS_DIGESTS, BLOCK,
            )  # fmt: skip
        if verified > 0:
            tl.atomic_add(counters + COUNT_VERIFIED + PHASE, verified.to(tl.int64), sem="relaxed")
        if HAS_DIGESTS:  # noqa: SIM102 - decided when compiled
            # Otherwise the position lies in a block.
            if (split == 0) & (digested >= 0) & (digested < start):
                slot = slot_at(table, table_stride, row, digested, PAGE_SIZE, digested >= 0)
                check_digest(records, num_slots, buffers, slot, digested, request, digest, PHASE)
    if HAS_KNOWN:  # noqa: SIM102 - decided when compiled
        if real & (split == 0):
            live = (row >= 0) & (row < num_rows)
            live = live & (known_len > 0) & (known_len <= length) & (known_len + KNOWN_LAG > prefix)
            slot = slot_at(table, table_stride, row, known_len - 1, PAGE_SIZE, live)
            slot = tl.where(live, slot, -1)
            check_known(records, num_slots, buffers, slot, known_len - 1, request, known_digest, PHASE)


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
        tl.atomic_add(counters + COUNT_RUNS + PHASE, 1, sem="relaxed")
    index = program * BLOCK + tl.arange(0, BLOCK)
    listed = index < num_listed
    slot = tl.load(slots + index, mask=listed, other=-1).to(tl.int64)
    position = tl.load(positions + index, mask=listed, other=0).to(tl.int64)
    previous = tl.load(previous_slots + index, mask=listed, other=-1).to(tl.int64)
    mask = listed & (slot >= 0)
    known = mask & (slot < num_slots)
    identity, chain = load_record(records, slot, known)
    linkable = mask & (previous >= 0) & (previous < num_slots)
    before, chain_before = load_record(records, previous, linkable)
    expected = _expected(position, continued(before, chain_before, position - 1))
    complete_before = (state_of(before) == COMPLETE) & (flaw_of(before, chain_before) == 0)
    linked = (position == 0) | ((position > 0) & complete_before)
    sound = identity_holds(identity, position, COMPLETE) & (flaw_of(identity, chain) == 0)
    sound = sound & (~linked | (chain.to(tl.uint64) == expected))
    verified = tl.sum(tl.where(mask & ~sound, BAD, mask.to(tl.int32)))
    if verified >= BAD:
        place = (slot, position, NO_REQUEST)
        verified = _judge(buffers, place, (known, identity, chain), expected, linked, mask, PHASE)
    count(counters, COUNT_VERIFIED + PHASE, verified)


def verify_rows(buffers: GroupBuffers, batch: RowBatch, phase: Phase) -> Callable[[], None] | None:
    """Launch the row check, see `op.verify_rows`; returns what does it again. None = it was compiled."""
    columns = columns_of(batch)
    requests, capacity = columns.addresses[NUM_ROW_COLUMNS - 1], columns.addresses[3]
    blocks = max(1, -(-capacity // (BLOCK - 1)))
    splits = min(blocks, max(_PROGRAMS // max(1, requests), -(-blocks // _MAX_ROUNDS)))
    grid = max(1, requests), splits
    key = "rows_kernel", phase, columns.kind
    start: Start | None = buffers.cache.get(key)
    if start is not None:
        launch = start.again(grid, columns.addresses[:NUM_ROW_COLUMNS])
        launch()
        return launch
    constants = {
        "PHASE": int(phase), "PAGE_SIZE": batch.page_size, "BLOCK": BLOCK,
        "HAS_DIGESTS": batch.digests is not None,
        "HAS_KNOWN": batch.known_lens is not None and phase is Phase.TAIL,
    }  # fmt: skip
    given = columns.tensors[:NUM_ROW_COLUMNS]
    buffers.cache[key] = prepare(rows_kernel, buffers, grid, given, {**constants, "num_warps": _WARPS})
    return None


def verify_list(
    buffers: GroupBuffers, slots: Tensor, positions: Tensor, previous: Tensor, phase: Phase
) -> None:
    """Launch the list check; see `op.verify_list`."""
    listed = slots.shape[0]
    grid = max(1, triton.cdiv(listed, BLOCK)), 1
    key = "list_kernel", phase, slots.dtype, positions.dtype, previous.dtype
    start: Start | None = buffers.cache.get(key)
    if start is not None:
        start(grid, (slots.data_ptr(), positions.data_ptr(), previous.data_ptr(), listed))
        return
    given = slots, positions, previous, listed
    buffers.cache[key] = prepare(list_kernel, buffers, grid, given, {"PHASE": int(phase), "BLOCK": BLOCK})
