"""What the compiled kernels share: mixing, columns, record fields, slot lookup, the violation log."""

from __future__ import annotations

import numpy as np

from canary_kernels import hashing, layout
from canary_kernels.frames import (
    CLOCK,
    COUNTERS,
    LANE_ROWS,
    NUM_SLOTS,
    PAGE_SIZE,
    RECORDS,
    TABLE,
    TABLE_STRIDE,
    VIOLATIONS,
    WIDE,
)
from canary_kernels.native import load_int32, load_int64, piece, store_int64

# numba makes a float of uint64 with int64: what is unsigned stays so.
_TOKEN_FACTOR, _POSITION_FACTOR = np.uint64(hashing.TOKEN_FACTOR), np.uint64(hashing.POSITION_FACTOR)
_MIX_OFFSET = np.uint64(hashing.MIX_OFFSET)
_FIRST, _SECOND = np.uint64(hashing.FINALIZE_FIRST), np.uint64(hashing.FINALIZE_SECOND)
_SHIFT_FIRST, _SHIFT_SECOND, _SHIFT_LAST = np.uint64(30), np.uint64(27), np.uint64(31)
ANCHOR = layout.CHAIN_ANCHOR  # below 2^63

_RECORD_BYTES = layout.RECORD_BYTES
_IDENTITY, _CHAIN = layout.IDENTITY, layout.CHAIN
_META_SHIFT, _STATE_MASK = 32, layout.STATE_MASK
_POSITION_SHIFT, _MAX_POSITION = 32 + layout.STATE_BITS, layout.MAX_POSITION
_FOLDS = tuple(np.uint64(shift) for shift in layout.FOLD_SHIFTS)
_FIRST_FOLD, _SECOND_FOLD, _THIRD_FOLD, _LAST_FOLD = _FOLDS
_CHECK_MASK = (1 << layout.CHECK_BITS) - 1

_COUNT_VIOLATIONS, _ROW_BYTES = layout.COUNT_VIOLATIONS, 8 * layout.ROW_WORDS
_ROW_EVENT, _ROW_STEP, _ROW_SLOT = layout.ROW_EVENT, layout.ROW_STEP, layout.ROW_SLOT
_ROW_POSITION, _ROW_REQUEST, _ROW_PART = layout.ROW_POSITION, layout.ROW_REQUEST, layout.ROW_PART
_ROW_EXPECTED, _ROW_ACTUAL = layout.ROW_EXPECTED, layout.ROW_ACTUAL


@piece
def mix64(token, position):
    """int64: what each token at its position adds to a chain; int64 in."""
    mixed = np.uint64(token) * _TOKEN_FACTOR + np.uint64(position) * _POSITION_FACTOR + _MIX_OFFSET
    mixed = (mixed ^ (mixed >> _SHIFT_FIRST)) * _FIRST
    mixed = (mixed ^ (mixed >> _SHIFT_SECOND)) * _SECOND
    return np.int64(mixed ^ (mixed >> _SHIFT_LAST))


@piece
def added(first, second):
    """int64: the sum, modulo 2^64."""
    return np.int64(np.uint64(first) + np.uint64(second))


@piece
def integer_at(address, size, index):
    """int64: element `index` of the integers of 4 or 8 bytes that lie at an address."""
    return load_int64(address, index) if size == 8 else load_int32(address, index)


@piece
def column(batch, which, index):
    """int64: one element of a batch's column."""
    address = load_int64(batch, which)
    if load_int64(batch, WIDE) >> which & 1:
        return load_int64(address, index)
    return load_int32(address, index)


@piece
def slot_at(batch, row, position):
    """int64: the slot of a position of a row; negative or too large where the table says so."""
    page_size = load_int64(batch, PAGE_SIZE)
    page = position // page_size
    cell = column(batch, TABLE, row * load_int64(batch, TABLE_STRIDE) + page)
    return cell * page_size + (position - page * page_size)


@piece
def record_at(buffers, slot):
    """int64: the address of a slot's record; 0 = the slot has none."""
    if slot < 0 or slot >= load_int64(buffers, NUM_SLOTS):
        return np.int64(0)
    return load_int64(buffers, RECORDS) + slot * _RECORD_BYTES


@piece
def token_of(identity):
    """int64: the record's token."""
    return np.int64(np.int32(identity))


@piece
def state_of(identity):
    """int64: the record's state."""
    return (identity >> _META_SHIFT) & _STATE_MASK


@piece
def position_of(identity):
    """int64: the record's position."""
    return (identity >> _POSITION_SHIFT) & _MAX_POSITION


@piece
def flaw_of(identity, chain):
    """int64: 0 where a record's check of itself holds (see layout.fold)."""
    bits = np.uint64(identity ^ chain)
    bits ^= bits >> _FIRST_FOLD
    bits ^= bits >> _SECOND_FOLD
    bits ^= bits >> _THIRD_FOLD
    bits ^= bits >> _LAST_FOLD
    return np.int64(bits) & _CHECK_MASK


@piece
def flaw_at(record):
    """int64: 0 where the check of the record at an address holds."""
    return flaw_of(load_int64(record, _IDENTITY), load_int64(record, _CHAIN))


@piece
def sealed(identity, chain):
    """int64: identity, which has no check yet, with its check (see layout.sealed)."""
    folded = flaw_of(identity, chain)
    return identity | folded << 60 | (folded >> 4) << 59


@piece
def continued(record, position):
    """int64: the chain after the record at an address, were it at this position."""
    token = token_of(load_int64(record, _IDENTITY))
    return added(load_int64(record, _CHAIN), mix64(token, position))


@piece
def count(buffers, index, amount):
    """Add to a counter."""
    counters = load_int64(buffers, COUNTERS)
    store_int64(counters, index, load_int64(counters, index) + amount)


@piece
def report(buffers, lane, place, part, expected, actual):
    """Count and log one violation; place = (slot, position, request).

    A log row is written at most once per step, by the first event that maps to it; row 0 holds event 0.
    """
    slot, position, request = place
    event = load_int64(load_int64(buffers, COUNTERS), _COUNT_VIOLATIONS + lane)
    count(buffers, _COUNT_VIOLATIONS + lane, 1)
    lane_rows = load_int64(buffers, LANE_ROWS)
    number = 0 if event == 0 else 1 + (event - 1) % (lane_rows - 1)
    row = load_int64(buffers, VIOLATIONS) + (lane * lane_rows + number) * _ROW_BYTES
    step = load_int64(load_int64(buffers, CLOCK), 0)
    if load_int64(row, _ROW_STEP) == step and load_int64(row, _ROW_EVENT) != 0:
        return
    store_int64(row, _ROW_EVENT, event + 1)
    store_int64(row, _ROW_STEP, step)
    store_int64(row, _ROW_SLOT, slot)
    store_int64(row, _ROW_POSITION, position)
    store_int64(row, _ROW_REQUEST, request)
    store_int64(row, _ROW_PART, part)
    store_int64(row, _ROW_EXPECTED, expected)
    store_int64(row, _ROW_ACTUAL, actual)
