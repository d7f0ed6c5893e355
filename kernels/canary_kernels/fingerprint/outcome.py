"""What the fingerprint kernel does with one slot: which records it works on, what it stores or reports."""

from __future__ import annotations

import triton
import triton.language as tl

from canary_kernels import layout
from canary_kernels.jit import (
    ADOPTED,
    AWAITED,
    BASELINE,
    COMPLETE,
    COUNT_UNVERIFIED,
    FINGERPRINT_K,
    FINGERPRINT_V,
    NUM_REASONS,
    NUM_UNVERIFIED,
    PENDING,
    RECORD_WORDS,
    position_of,
    report,
)
from canary_kernels.layout import NO_REQUEST, Phase

HASH, COMPLETING, COMPARING, BASELINING = (tl.constexpr(number) for number in range(4))
PENDING_TO_COMPLETE = tl.constexpr(layout.PENDING_TO_COMPLETE)
ADOPTED_TO_BASELINE = tl.constexpr(layout.ADOPTED_TO_BASELINE)
TAIL = tl.constexpr(int(Phase.TAIL))
SWEEP = tl.constexpr(int(Phase.SWEEP))
PATROL = tl.constexpr(int(Phase.PATROL))
HIT = tl.constexpr(int(Phase.HIT))
DATA_REASON = tl.constexpr(int(layout.Reason.KV_DATA))
RECORD_REASON = tl.constexpr(int(layout.Reason.RECORD))
LOST_REASON = tl.constexpr(int(layout.Reason.LOST_WRITE))
PART_K = tl.constexpr(int(layout.Part.K))
PART_V = tl.constexpr(int(layout.Part.V))
UNVERIFIED_ADOPTED = tl.constexpr(int(layout.Unverified.ADOPTED))
UNVERIFIED_PENDING = tl.constexpr(int(layout.Unverified.PENDING))
UNVERIFIED_NO_FINGERPRINT = tl.constexpr(int(layout.Unverified.NO_FINGERPRINT))
COUNT_RUNS = tl.constexpr(layout.COUNT_RUNS)
COUNT_HASHED = tl.constexpr(layout.COUNT_HASHED)
COUNT_BASELINES = tl.constexpr(layout.COUNT_BASELINES)
COUNT_BASELINE_RUNS = tl.constexpr(layout.COUNT_BASELINE_RUNS)
COUNT_CENSUS = tl.constexpr(layout.COUNT_CENSUS)
COUNT_COMPLETED = tl.constexpr(layout.COUNT_COMPLETED)
COUNT_COMPLETE_RUNS = tl.constexpr(layout.COUNT_COMPLETE_RUNS)
COUNT_UNHASHED = tl.constexpr(layout.COUNT_UNHASHED)
COUNT_UNCOMPLETED = tl.constexpr(layout.COUNT_UNCOMPLETED)
NOBODY = tl.constexpr(NO_REQUEST)
_ONE_WANTED, _ALL = tl.constexpr(1 << 32 | 1), tl.constexpr((1 << 32) - 1)


@triton.jit
def sum_of_shares(share, wanted, hash_k, hash_v):
    """Add this program's part of a slot's hashes to int64 [3]: two sums, and how many programs have come.

    Returns whether it was the last of those along axis 1, whether all of them found the record `wanted`
    (another stream may change its state meanwhile), and the sums. Leaves zeros.
    """
    tl.atomic_add(share, hash_k, sem="relaxed")
    tl.atomic_add(share + 1, hash_v, sem="relaxed")
    # The only place where a program reads what others wrote: its sums are there before it is counted.
    one = tl.where(wanted, hash_k * 0 + _ONE_WANTED, hash_k * 0 + 1)
    come = tl.atomic_add(share + 2, one, sem="acq_rel") + one
    programs = tl.num_programs(1).to(tl.int64)
    last = (come & _ALL) == programs
    if last:
        hash_k = tl.atomic_xchg(share, hash_k * 0, sem="relaxed")
        hash_v = tl.atomic_xchg(share + 1, hash_v * 0, sem="relaxed")
        tl.atomic_xchg(share + 2, hash_k * 0, sem="relaxed")
    return last, come >> 32 == programs, hash_k, hash_v


@triton.jit
def finish(
    records,
    buffers,
    slot,
    identity,
    hash_k,
    hash_v,
    HAS_DATA: tl.constexpr,
    OP: tl.constexpr,
    PHASE: tl.constexpr,
):
    """Store or compare the fingerprints of one slot whose record is in the state the operation works on."""
    record = records + slot * RECORD_WORDS
    stored_k = tl.load(record + FINGERPRINT_K)
    stored_v = tl.load(record + FINGERPRINT_V)
    position = position_of(identity)
    if OP == COMPLETING:
        if HAS_DATA:
            lost = ((stored_k != 0) | (stored_v != 0)) & (stored_k == hash_k) & (stored_v == hash_v)
            if lost:
                lane = TAIL * NUM_REASONS + LOST_REASON
                report(buffers, lost, lane, slot, position, NOBODY, PART_K, stored_k, hash_k)
        tl.store(record + FINGERPRINT_K, hash_k)
        tl.store(record + FINGERPRINT_V, hash_v)
        tl.store(record, identity ^ PENDING_TO_COMPLETE)
        tl.atomic_add(buffers[0] + COUNT_COMPLETED, 1, sem="relaxed")
    elif OP == BASELINING:
        tl.store(record + FINGERPRINT_K, hash_k)
        tl.store(record + FINGERPRINT_V, hash_v)
        tl.store(record, identity ^ ADOPTED_TO_BASELINE)
        tl.atomic_add(buffers[0] + COUNT_BASELINES, 1, sem="relaxed")
    else:
        lane = PHASE * NUM_REASONS + DATA_REASON
        wrong = stored_k != hash_k
        if wrong:
            report(buffers, wrong, lane, slot, position, NOBODY, PART_K, stored_k, hash_k)
        wrong = stored_v != hash_v
        if wrong:
            report(buffers, wrong, lane, slot, position, NOBODY, PART_V, stored_v, hash_v)
        tl.atomic_add(buffers[0] + COUNT_HASHED + PHASE, 1, sem="relaxed")


@triton.jit
def concerns(state, OP: tl.constexpr):
    """Whether an operation works on records in this state; -1 = damaged."""
    if OP == COMPLETING:
        return state == PENDING
    if OP == BASELINING:
        return state == ADOPTED
    return (state == COMPLETE) | (state == BASELINE)


@triton.jit
def count_skipped(counters, state, HAS_DATA: tl.constexpr, PHASE: tl.constexpr):
    """Count a slot that a comparison met and could not check."""
    causes = counters + COUNT_UNVERIFIED + PHASE * NUM_UNVERIFIED
    if PHASE == PATROL:
        if (state == ADOPTED) | (state == AWAITED):
            tl.atomic_add(causes + UNVERIFIED_ADOPTED, 1, sem="relaxed")
        if state == PENDING:
            tl.atomic_add(causes + UNVERIFIED_PENDING, 1, sem="relaxed")
    if not HAS_DATA and concerns(state, COMPARING):
        tl.atomic_add(causes + UNVERIFIED_NO_FINGERPRINT, 1, sem="relaxed")


@triton.jit
def count_left_out(counters, OP: tl.constexpr, PHASE: tl.constexpr, LAST: tl.constexpr):
    """Count a slot that was given and neither completed nor compared."""
    if LAST and OP == COMPLETING:
        tl.atomic_add(counters + COUNT_UNCOMPLETED, 1, sem="relaxed")
    elif LAST and OP == COMPARING:
        tl.atomic_add(counters + COUNT_UNHASHED + PHASE, 1, sem="relaxed")


@triton.jit
def report_flaw(buffers, slot, identity, flaw, PHASE: tl.constexpr):
    """Report a record whose check of itself does not hold, in the phases in which nothing verifies it."""
    if PHASE != TAIL and PHASE != SWEEP:
        damaged = flaw != 0
        if damaged:
            lane = PHASE * NUM_REASONS + RECORD_REASON
            report(buffers, damaged, lane, slot, position_of(identity), NOBODY, 0, 0, flaw)


@triton.jit
def count_without_history(counters, state, HAS_DATA: tl.constexpr):
    """Count a slot that has no history by the state that it will be left in."""
    if (state == ADOPTED) | (state == BASELINE) | (state == AWAITED):
        left = state
        if HAS_DATA:
            left = tl.where(state == ADOPTED, BASELINE, state)
        tl.atomic_add(counters + COUNT_CENSUS + left, 1, sem="relaxed")
