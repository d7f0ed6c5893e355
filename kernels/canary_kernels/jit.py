"""Triton functions that the kernels share: mixing, record fields, slot lookup, the violation log."""

from __future__ import annotations

import triton
import triton.language as tl

from canary_kernels import hashing, layout

TOKEN_FACTOR = tl.constexpr(hashing.TOKEN_FACTOR)
POSITION_FACTOR = tl.constexpr(hashing.POSITION_FACTOR)
MIX_OFFSET = tl.constexpr(hashing.MIX_OFFSET)
FINALIZE_FIRST = tl.constexpr(hashing.FINALIZE_FIRST)
FINALIZE_SECOND = tl.constexpr(hashing.FINALIZE_SECOND)
ANCHOR = tl.constexpr(layout.CHAIN_ANCHOR)

RECORD_WORDS = tl.constexpr(layout.RECORD_WORDS)
IDENTITY = tl.constexpr(layout.IDENTITY)
CHAIN = tl.constexpr(layout.CHAIN)
FINGERPRINT_K = tl.constexpr(layout.FINGERPRINT_K)
FINGERPRINT_V = tl.constexpr(layout.FINGERPRINT_V)
STATE_BITS = tl.constexpr(layout.STATE_BITS)
STATE_MASK = tl.constexpr(layout.STATE_MASK)
POSITION_MASK = tl.constexpr(layout.MAX_POSITION)
STATE_AND_POSITION = tl.constexpr(layout.STATE_AND_POSITION_MASK)
EMPTY = tl.constexpr(int(layout.RecordState.EMPTY))
PENDING = tl.constexpr(int(layout.RecordState.PENDING))
COMPLETE = tl.constexpr(int(layout.RecordState.COMPLETE))
ADOPTED = tl.constexpr(int(layout.RecordState.ADOPTED))
BASELINE = tl.constexpr(int(layout.RecordState.BASELINE))
AWAITED = tl.constexpr(int(layout.RecordState.AWAITED))

NUM_REASONS = tl.constexpr(layout.NUM_REASONS)
NUM_UNVERIFIED = tl.constexpr(layout.NUM_UNVERIFIED)
COUNT_VIOLATIONS = tl.constexpr(layout.COUNT_VIOLATIONS)
COUNT_UNVERIFIED = tl.constexpr(layout.COUNT_UNVERIFIED)
ROW_WORDS = tl.constexpr(layout.ROW_WORDS)
ROW_EVENT = tl.constexpr(layout.ROW_EVENT)
ROW_STEP = tl.constexpr(layout.ROW_STEP)
ROW_SLOT = tl.constexpr(layout.ROW_SLOT)
ROW_POSITION = tl.constexpr(layout.ROW_POSITION)
ROW_REQUEST = tl.constexpr(layout.ROW_REQUEST)
ROW_PART = tl.constexpr(layout.ROW_PART)
ROW_EXPECTED = tl.constexpr(layout.ROW_EXPECTED)
ROW_ACTUAL = tl.constexpr(layout.ROW_ACTUAL)


@triton.jit
def mix64(token, position):
    """uint64: what each token at its position adds to a chain; int64 in."""
    mixed = token.to(tl.uint64) * TOKEN_FACTOR + position.to(tl.uint64) * POSITION_FACTOR + MIX_OFFSET
    mixed = (mixed ^ (mixed >> 30)) * FINALIZE_FIRST
    mixed = (mixed ^ (mixed >> 27)) * FINALIZE_SECOND
    return mixed ^ (mixed >> 31)


@triton.jit
def continued(identity, chain, position):
    """uint64: the chain after a record (int64 identity and chain) that stands at position."""
    return chain.to(tl.uint64) + mix64((identity << 32) >> 32, position)


@triton.jit
def state_of(identity):
    """int64: the record's state."""
    return (identity >> 32) & STATE_MASK


@triton.jit
def position_of(identity):
    """int64: the record's position."""
    return (identity >> (32 + STATE_BITS)) & POSITION_MASK


@triton.jit
def identity_holds(identity, position, STATE: tl.constexpr):
    """Whether a record has this state, and this position, which may be too large for any."""
    return ((identity >> 32) & STATE_AND_POSITION) == ((position << STATE_BITS) | STATE)


@triton.jit
def flaw_of(identity, chain):
    """int64: 0 where a record's check of itself holds (see layout.fold)."""
    bits = (identity ^ chain).to(tl.uint64)
    bits = bits ^ (bits >> 40)
    bits = bits ^ (bits >> 20)
    bits = bits ^ (bits >> 10)
    bits = bits ^ (bits >> 5)
    return bits.to(tl.int64) & 31


@triton.jit
def sealed(identity, chain):
    """int64: identity, which has no check yet, with its check (see layout.sealed)."""
    folded = flaw_of(identity, chain)
    return identity | (folded << 60) | ((folded >> 4) << 59)


@triton.jit
def load_record(records, slot, known):
    """int64 pair: identity and chain of records, 0 where not known; one 16-byte load each."""
    words = (slot * RECORD_WORDS)[:, None] + tl.arange(0, 2)[None, :]
    return tl.split(tl.load(records + words, mask=known[:, None], other=0))


@triton.jit
def slot_at(table, table_stride, row, position, PAGE_SIZE: tl.constexpr, mask):
    """int64: slots of positions of a row; -1 where masked, negative or too large where the table says so."""
    cells = table + row * table_stride
    if PAGE_SIZE == 1:
        slot = tl.load(cells + position, mask=mask, other=-1).to(tl.int64)
    else:
        page = tl.load(cells + position // PAGE_SIZE, mask=mask, other=-1).to(tl.int64)
        slot = page * PAGE_SIZE + position % PAGE_SIZE
    return slot


# Atomics are relaxed: nothing within a launch reads what another program wrote, and the fence of the
# default order costs each program about a microsecond.
@triton.jit
def count(counters, index, amount):
    """Add to a counter; nothing when the amount is 0."""
    tl.atomic_add(counters + index, amount.to(tl.int64), mask=amount > 0, sem="relaxed")


@triton.jit
def report(buffers, mask, lane, slot, position, request, part, expected, actual):
    """Count and log violations where mask holds; buffers = (counters, violations, clock, lane_rows).

    A log row is written at most once per step, by whichever program claims it first.
    """
    counters, violations, clock, lane_rows = buffers
    one = tl.where(mask, 1, 0).to(tl.int64)
    lane = one * 0 + lane
    event = tl.atomic_add(counters + COUNT_VIOLATIONS + lane, one, mask=mask, sem="relaxed")
    place = tl.where(event == 0, 0, 1 + (event - 1) % (lane_rows - 1))
    row = violations + (lane * lane_rows + place) * ROW_WORDS
    step = tl.load(clock)
    # Two events that map to one row would tear it: the exchange lets exactly one of a step write.
    claimed = tl.atomic_xchg(row + ROW_STEP, one * 0 + step, mask=mask, sem="relaxed")
    # Step 0 is no claim: it is what an unused row holds.
    mine = mask & (claimed != tl.where(step == 0, -1, step))
    tl.store(row + ROW_EVENT, event + 1, mask=mine)
    tl.store(row + ROW_SLOT, slot, mask=mine)
    tl.store(row + ROW_POSITION, position, mask=mine)
    tl.store(row + ROW_REQUEST, request, mask=mine)
    tl.store(row + ROW_PART, part, mask=mine)
    tl.store(row + ROW_EXPECTED, expected, mask=mine)
    tl.store(row + ROW_ACTUAL, actual, mask=mine)
