"""Arrivals in Triton: one program per block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from canary_kernels import layout
from canary_kernels.arrival.columns import ARRIVAL_WORDS, Arrival, Unchanged
from canary_kernels.fingerprint.outcome import COUNT_HASHED, DATA_REASON, NOBODY, PART_K, PART_V
from canary_kernels.jit import NUM_REASONS, report
from canary_kernels.launch import prepare

if TYPE_CHECKING:
    from torch import Tensor

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
REPLACED = tl.constexpr(int(Unchanged.REPLACED))


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
    matched = torch.zeros(count, dtype=torch.int64, device=blocks.device)
    if not count:
        return matched
    start: Start | None = buffers.cache.get("arrival_kernel")
    if start is not None:
        start((count, 1), (blocks.data_ptr(), sent.data_ptr(), matched.data_ptr(), width))
        return matched
    given = blocks, sent, matched, width
    buffers.cache["arrival_kernel"] = prepare(arrival_kernel, buffers, (count, 1), given, {})
    return matched
