"""Arrivals in Triton: one program per block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from canary_kernels import layout
from canary_kernels.arrival.columns import ARRIVAL_WORDS, EDGE_WORDS, Arrival, Edge, Unchanged
from canary_kernels.fingerprint.outcome import COUNT_HASHED, DATA_REASON, NOBODY, PART_K, PART_V
from canary_kernels.jit import (
    BASELINE,
    CHAIN,
    COMPLETE,
    FINGERPRINT_K,
    FINGERPRINT_V,
    IDENTITY,
    NUM_REASONS,
    RECORD_WORDS,
    position_of,
    report,
    state_of,
)
from canary_kernels.launch import prepare

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.arrival.load import ArrivedLoad
    from canary_kernels.buffers import GroupBuffers
    from canary_kernels.launch import Start

HEAD = tl.constexpr(int(layout.Phase.HEAD))
LOST_LOAD = tl.constexpr(int(layout.Reason.LOST_LOAD))
COUNT_UNHASHED = tl.constexpr(layout.COUNT_UNHASHED)
COUNT_LOADS_COMPARED = tl.constexpr(layout.COUNT_LOADS_COMPARED)
COUNT_LOADS_LEFT_OUT = tl.constexpr(layout.COUNT_LOADS_LEFT_OUT)
WORDS = tl.constexpr(ARRIVAL_WORDS)
SLOT = tl.constexpr(int(Arrival.SLOT))
POSITION = tl.constexpr(int(Arrival.POSITION))
SLOTS = tl.constexpr(int(Arrival.SLOTS))
COPIES = tl.constexpr(int(Arrival.COPIES))
UNCHANGED_K = tl.constexpr(int(Arrival.UNCHANGED_K))
UNCHANGED_V = tl.constexpr(int(Arrival.UNCHANGED_V))
NOW_K = tl.constexpr(int(Arrival.NOW_K))
NOW_V = tl.constexpr(int(Arrival.NOW_V))
CHANGED = tl.constexpr(int(Unchanged.CHANGED))
SAME = tl.constexpr(int(Unchanged.SAME))
REPLACED = tl.constexpr(int(Unchanged.REPLACED))
EDGES = tl.constexpr(EDGE_WORDS)
FIRST = tl.constexpr(int(Edge.FIRST))
STOP = tl.constexpr(int(Edge.STOP))
GIVEN = tl.constexpr(int(Edge.COPIES))
FILLED = tl.constexpr(int(Edge.FILLED))
TOKEN_MASK = tl.constexpr(layout.TOKEN_MASK)
COMPLETE_TO_BASELINE = tl.constexpr(layout.COMPLETE_TO_BASELINE)
CHUNK_SLOTS = 64  # of a block that a program looks at in one go


@triton.jit
def _judge(buffers, row, known, wrong, unchanged, part, expected, now):
    """Report one part of a block."""
    lost = (wrong & (unchanged != CHANGED)) | ((known == 0) & (unchanged == REPLACED))
    expected = tl.where(known, expected, now)
    reason = tl.where(lost, LOST_LOAD, DATA_REASON)
    if wrong | lost:
        slot = tl.load(row + SLOT)
        position = tl.load(row + POSITION)
        lane = HEAD * NUM_REASONS + reason
        report(buffers, wrong | lost, lane, slot, position, NOBODY, part, expected, now)


@triton.jit(
    do_not_specialize=["num_slots", "lane_rows", "width"],
    do_not_specialize_on_alignment=["blocks", "sent", "matched"],
)
def arrival_kernel(
    records, counters, violations, clock, num_slots, lane_rows,
    blocks, sent, matched, width,
):  # fmt: skip
    """Program i judges the i-th block; sent = int64 [n, width, 2]."""
    index = tl.program_id(0).to(tl.int64)
    row = blocks + index * WORDS
    copies = tl.minimum(tl.load(row + COPIES), width)
    now_k = tl.load(row + NOW_K)
    now_v = tl.load(row + NOW_V)
    first = sent + index * width * 2
    equal_k = index < 0
    equal_v = index < 0
    both = index < 0
    for number in range(copies):
        same_k = tl.load(first + number * 2) == now_k
        same_v = tl.load(first + number * 2 + 1) == now_v
        equal_k = equal_k | same_k
        equal_v = equal_v | same_v
        both = both | (same_k & same_v)
    known = copies > 0
    # Parts of two different copies: each is right by itself, and K is named for both.
    wrong_k = known & (both == 0) & ((equal_k == 0) | equal_v)
    wrong_v = known & (both == 0) & (equal_v == 0)
    expected_k = tl.load(first, mask=known, other=0)
    expected_v = tl.load(first + 1, mask=known, other=0)
    buffers = (counters, violations, clock, lane_rows)
    _judge(buffers, row, known, wrong_k, tl.load(row + UNCHANGED_K), PART_K, expected_k, now_k)
    _judge(buffers, row, known, wrong_v, tl.load(row + UNCHANGED_V), PART_V, expected_v, now_v)
    slots = tl.load(row + SLOTS)
    hashed = tl.where(known, COUNT_HASHED + HEAD, COUNT_UNHASHED + HEAD)
    loads = tl.where(known, COUNT_LOADS_COMPARED, COUNT_LOADS_LEFT_OUT)
    tl.atomic_add(counters + hashed, slots, sem="relaxed")
    tl.atomic_add(counters + loads, slots, sem="relaxed")
    tl.store(matched + index, both.to(tl.int64))


def judge_arrivals(buffers: GroupBuffers, blocks: Tensor, sent: Tensor) -> Tensor:
    """Launch; see `op.judge_arrivals`."""
    count, width = sent.shape[0], sent.shape[1]
    matched = torch.empty(count, dtype=torch.int64, device=blocks.device)
    if not count:
        return matched
    start: Start | None = buffers.cache.get("arrival_kernel")
    if start is not None:
        start((count, 1), (blocks.data_ptr(), sent.data_ptr(), matched.data_ptr(), width))
        return matched
    given = blocks, sent, matched, width
    buffers.cache["arrival_kernel"] = prepare(arrival_kernel, buffers, (count, 1), given, {})
    return matched


@triton.jit
def _left(now, before, known, zero, replaced, within):
    """int64 counts of a chunk of one part: slots that changed, that are the same, and that may not be."""
    empty = (now == 0) & zero
    same = (known & (now == before)) | empty
    changed = tl.sum((within & known & (same == 0)).to(tl.int64), 0)
    kept = tl.sum((within & same).to(tl.int64), 0)
    return changed, kept, tl.sum((within & same & (replaced | empty)).to(tl.int64), 0)


@triton.jit
def _unchanged(changed, kept, wrong):
    """int64: the part's `Unchanged`, of the counts of all chunks."""
    return tl.where((changed == 0) & (kept > 0), tl.where(wrong > 0, REPLACED, SAME), CHANGED)


@triton.jit(
    do_not_specialize=["num_slots", "lane_rows", "size"],
    do_not_specialize_on_alignment=["slots", "old", "identities", "now", "edges", "keys", "held", "blocks"],
)
def weigh_kernel(
    records, counters, violations, clock, num_slots, lane_rows,
    slots, old, identities, now, edges, keys, held, blocks, size, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program i sums up the i-th block, of `size` slots."""
    index = tl.program_id(0).to(tl.int64)
    first = tl.load(edges + index * EDGES + FIRST)
    stop = tl.load(edges + index * EDGES + STOP)
    copies = tl.load(edges + index * EDGES + GIVEN)
    filled = tl.load(edges + index * EDGES + FILLED)
    none = index * 0
    fold_k, changed_k, kept_k, wrong_k = none, none, none, none
    fold_v, changed_v, kept_v, wrong_v = none, none, none, none
    for start in range(0, size, CHUNK):
        offset = start + tl.arange(0, CHUNK)
        inside = offset < size
        within = inside & (offset >= first) & (offset < stop)
        compared = inside & tl.where(copies > 0, offset < filled, within)
        place = index * size + offset
        key = tl.load(keys + offset, mask=inside, other=0)
        now_k = tl.load(now + place * 2, mask=inside, other=0)
        now_v = tl.load(now + place * 2 + 1, mask=inside, other=0)
        fold_k += tl.sum(tl.where(compared, now_k * key, 0), 0)
        fold_v += tl.sum(tl.where(compared, now_v * key, 0), 0)
        identity = tl.load(identities + place * 2, mask=inside, other=0)
        record = old + place * RECORD_WORDS
        before = tl.load(record + IDENTITY, mask=inside, other=0)
        chain = tl.load(record + CHAIN, mask=inside, other=0)
        complete = state_of(before) == COMPLETE
        # A baseline of bytes that were loaded has an identity, one taken of unknown bytes has no chain.
        baseline = state_of(before) == BASELINE
        named = complete | (baseline & (chain != 0))
        known = complete | baseline
        token = ((before ^ identity) & TOKEN_MASK) != 0
        moved = position_of(before ^ identity) != 0
        zero = (known == 0) & (position_of(identity) > 0)
        # V does not depend on the position in every model; a token alone may rightly leave zeros.
        before_k = tl.load(record + FINGERPRINT_K, mask=inside, other=0)
        before_v = tl.load(record + FINGERPRINT_V, mask=inside, other=0)
        changed, kept, wrong = _left(now_k, before_k, known, zero, named & (token | moved), within)
        changed_k, kept_k, wrong_k = changed_k + changed, kept_k + kept, wrong_k + wrong
        changed, kept, wrong = _left(now_v, before_v, known, zero, named & token, within)
        changed_v, kept_v, wrong_v = changed_v + changed, kept_v + kept, wrong_v + wrong
    row = blocks + index * WORDS
    tl.store(row + SLOT, tl.load(slots + index * size))
    tl.store(row + POSITION, position_of(tl.load(identities + index * size * 2)))
    tl.store(row + SLOTS, tl.where(copies > 0, filled, tl.maximum(stop - first, 0)))
    tl.store(row + COPIES, copies)
    tl.store(row + UNCHANGED_K, _unchanged(changed_k, kept_k, wrong_k) * tl.load(held))
    tl.store(row + UNCHANGED_V, _unchanged(changed_v, kept_v, wrong_v) * tl.load(held + 1))
    tl.store(row + NOW_K, fold_k)
    tl.store(row + NOW_V, fold_v)


@triton.jit(
    do_not_specialize=["num_slots", "lane_rows", "size"],
    do_not_specialize_on_alignment=["slots", "identities", "now", "edges", "matched"],
)
def keep_kernel(
    records, counters, violations, clock, num_slots, lane_rows,
    slots, identities, now, edges, matched, size, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program i stores the records of a chunk of the i-th block, of `size` slots."""
    index = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = offset < size
    first = tl.load(edges + index * EDGES + FIRST)
    stop = tl.load(edges + index * EDGES + STOP)
    place = index * size + offset
    slot = tl.load(slots + place, mask=inside, other=-1)
    slot = tl.where((offset >= first) & (offset < stop), slot, -1)
    tl.store(slots + place, slot, mask=inside)
    identity = tl.load(identities + place * 2, mask=inside, other=0)
    chain = tl.load(identities + place * 2 + 1, mask=inside, other=0)
    identity = tl.where(tl.load(matched + index) != 0, identity, identity ^ COMPLETE_TO_BASELINE)
    known = inside & (slot >= 0) & (slot < num_slots)
    record = records + slot * RECORD_WORDS
    tl.store(record + IDENTITY, identity, mask=known)
    tl.store(record + CHAIN, chain, mask=known)
    tl.store(record + FINGERPRINT_K, tl.load(now + place * 2, mask=inside, other=0), mask=known)
    tl.store(record + FINGERPRINT_V, tl.load(now + place * 2 + 1, mask=inside, other=0), mask=known)


@triton.jit(
    do_not_specialize=["num_slots", "lane_rows", "size", "baselines"],
    do_not_specialize_on_alignment=["slots", "keys", "folds"],
)
def fold_kernel(
    records, counters, violations, clock, num_slots, lane_rows,
    slots, keys, folds, size, baselines, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program i folds the records of the i-th block, of `size` slots; baselines: 1 = they will do, else 0."""
    index = tl.program_id(0).to(tl.int64)
    none = index * 0
    fold_k, fold_v, filled, complete = none, none, none, none
    for start in range(0, size, CHUNK):
        offset = start + tl.arange(0, CHUNK)
        slot = tl.load(slots + index * size + offset, mask=offset < size, other=-1)
        key = tl.load(keys + offset, mask=offset < size, other=0)
        held = (slot >= 0) & (slot < num_slots)
        record = records + slot * RECORD_WORDS
        state = state_of(tl.load(record + IDENTITY, mask=held, other=0))
        fold_k += tl.sum(tl.load(record + FINGERPRINT_K, mask=held, other=0) * key, 0)
        fold_v += tl.sum(tl.load(record + FINGERPRINT_V, mask=held, other=0) * key, 0)
        filled += tl.sum((slot >= 0).to(tl.int64), 0)
        whole = (state == COMPLETE) | ((state == BASELINE) & (baselines != 0))
        complete += tl.sum((held & whole).to(tl.int64), 0)
    tl.store(folds + index * 3, ((filled > 0) & (complete == filled)).to(tl.int64))
    tl.store(folds + index * 3 + 1, fold_k)
    tl.store(folds + index * 3 + 2, fold_v)


def fold_records(buffers: GroupBuffers, slots: Tensor, keys: Tensor, *, baselines: bool) -> Tensor:
    """Launch; see `op.fold_records`."""
    folds = torch.empty((slots.shape[0], 3), dtype=torch.int64, device=slots.device)
    given = slots, keys, folds
    _launch(buffers, fold_kernel, (slots.shape[0], 1), given, slots.shape[1], int(baselines))
    return folds


def weigh_arrivals(buffers: GroupBuffers, load: ArrivedLoad) -> Tensor:
    """Launch; see `op.weigh_arrivals`."""
    count, size = load.slots.shape
    blocks = torch.empty((count, ARRIVAL_WORDS), dtype=torch.int64, device=load.slots.device)
    given = load.slots, load.old, load.identities, load.now, load.edges, load.keys, load.held, blocks
    _launch(buffers, weigh_kernel, (count, 1), given, size)
    return blocks


def keep_arrivals(buffers: GroupBuffers, load: ArrivedLoad, matched: Tensor) -> None:
    """Launch; see `op.keep_arrivals`."""
    count, size = load.slots.shape
    given = load.slots, load.identities, load.now, load.edges, matched
    _launch(buffers, keep_kernel, (count, triton.cdiv(size, CHUNK_SLOTS)), given, size)


def _launch(
    buffers: GroupBuffers, kernel: Any, grid: tuple[int, int], tensors: tuple[Tensor, ...], *numbers: int
) -> None:
    if not grid[0]:
        return
    start: Start | None = buffers.cache.get(kernel)
    if start is not None:
        start(grid, (*(tensor.data_ptr() for tensor in tensors), *numbers))
    else:
        constants = {"CHUNK": CHUNK_SLOTS}
        buffers.cache[kernel] = prepare(kernel, buffers, grid, (*tensors, *numbers), constants)
