"""Verify compiled for the CPU: record after record, each against the one before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from canary_kernels import layout
from canary_kernels.frames import (
    DIGESTS,
    EXTEND_LENS,
    HAS_DIGESTS,
    HAS_KNOWN,
    KNOWN_DIGESTS,
    KNOWN_LENS,
    NUM_REQUESTS,
    NUM_ROWS,
    PAGE_SIZE,
    PREFIX_LENS,
    ROWS,
    STARTS,
    TABLE,
    TABLE_STRIDE,
    WIDTH,
    frame_of_batch,
    frame_of_buffers,
)
from canary_kernels.layout import Phase, Reason, RecordState, Unverified
from canary_kernels.native import kernel, load_int64, piece
from canary_kernels.native_records import (
    ANCHOR,
    column,
    continued,
    count,
    flaw_at,
    position_of,
    record_at,
    report,
    slot_at,
    state_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers, RowBatch

_HEAD, _TAIL, _NO_REQUEST = int(Phase.HEAD), int(Phase.TAIL), layout.NO_REQUEST
_WRITE_TOKEN, _KNOWN_LAG = int(Reason.WRITE_TOKEN), layout.KNOWN_LAG
_COUNT_TOKENS_COMPARED = layout.COUNT_TOKENS_COMPARED
_COUNT_TOKENS_LEFT_OUT = layout.COUNT_TOKENS_LEFT_OUT
_PENDING, _COMPLETE = int(RecordState.PENDING), int(RecordState.COMPLETE)
_ADOPTED, _AWAITED = int(RecordState.ADOPTED), int(RecordState.AWAITED)
_BASELINE = int(RecordState.BASELINE)
_COUNT_ADOPTED = layout.COUNT_UNVERIFIED + int(Unverified.ADOPTED)
_COUNT_BASELINE = layout.COUNT_UNVERIFIED + int(Unverified.BASELINE)
_COUNT_PENDING = layout.COUNT_UNVERIFIED + int(Unverified.PENDING)
_NUM_UNVERIFIED, _NUM_REASONS = layout.NUM_UNVERIFIED, layout.NUM_REASONS
_COUNT_VERIFIED, _COUNT_RUNS = layout.COUNT_VERIFIED, layout.COUNT_RUNS
_UNWRITTEN, _POSITION = int(Reason.UNWRITTEN), int(Reason.POSITION)
_CHAIN_BROKEN, _TOKEN = int(Reason.CHAIN), int(Reason.TOKEN)
_IDENTITY, _CHAIN, _STATE_BITS = layout.IDENTITY, layout.CHAIN, layout.STATE_BITS
_STATE_AND_POSITION, _DAMAGED = layout.STATE_AND_POSITION_MASK, int(Reason.RECORD)


@piece
def _is_complete(record):
    """Whether there is a record at an address (0 = none), whose check of itself holds, in this state."""
    return record != 0 and state_of(load_int64(record, _IDENTITY)) == _COMPLETE and flaw_at(record) == 0


@piece
def _judge(buffers, phase, place, record, before):
    """Classify one record, count, and log what is wrong with it; `before` = address of the one before, or 0.

    Returns 1 for a COMPLETE record, sound or not, else 0.
    """
    _, position, _ = place
    lanes = phase * _NUM_REASONS
    identity = load_int64(record, _IDENTITY) if record else 0
    state = state_of(identity) if record else -1
    flaw = flaw_at(record) if record else 0
    if flaw:
        report(buffers, lanes + _DAMAGED, place, 0, 0, flaw)
        return 0
    if state == _ADOPTED or (state == _AWAITED and phase != _HEAD):
        count(buffers, _COUNT_ADOPTED + phase * _NUM_UNVERIFIED, 1)
        return 0
    if state == _BASELINE:
        count(buffers, _COUNT_BASELINE + phase * _NUM_UNVERIFIED, 1)
        return 0
    if state in (_PENDING, _AWAITED) and phase == _HEAD:  # this very forward writes it, or brings its bytes
        count(buffers, _COUNT_PENDING + phase * _NUM_UNVERIFIED, 1)
        return 0
    if state != _COMPLETE:
        report(buffers, lanes + _UNWRITTEN, place, 0, _COMPLETE, state)
        return 0
    if position_of(identity) != position:
        report(buffers, lanes + _POSITION, place, 0, position, position_of(identity))
        return 1
    linked = position > 0 and _is_complete(before)
    if linked or position == 0:
        expected = continued(before, position - 1) if linked else ANCHOR
        chain = load_int64(record, _CHAIN)
        if chain != expected:
            report(buffers, lanes + _CHAIN_BROKEN, place, 0, expected, chain)
    return 1


@piece
def _check_span(buffers, batch, phase, request, row, start, stop):
    """Check the records of one request's positions start..stop; returns how many were COMPLETE."""
    page_size = load_int64(batch, PAGE_SIZE)
    page = start // page_size
    offset = start - page * page_size
    cells = row * load_int64(batch, TABLE_STRIDE)
    cell = column(batch, TABLE, cells + page)
    verified = before = expected = 0
    sound = False  # whether the record before is sound, so that `expected` holds
    for position in range(start, stop):
        slot = cell * page_size + offset
        record = record_at(buffers, slot)
        clean = False
        if record:
            wanted = position << _STATE_BITS | _COMPLETE
            held = load_int64(record, _IDENTITY) >> 32 & _STATE_AND_POSITION
            if held == wanted and flaw_at(record) == 0:
                if sound:
                    clean = load_int64(record, _CHAIN) == expected
                elif position == start:
                    clean = position > 0 or load_int64(record, _CHAIN) == ANCHOR
        if clean:
            verified += 1
        else:
            verified += _judge(buffers, phase, (slot, position, request), record, before)
        sound = clean or _is_complete(record)
        if sound:
            expected = continued(record, position)
        before = record
        offset += 1
        if offset == page_size and position + 1 < stop:
            offset = 0
            page += 1
            cell = column(batch, TABLE, cells + page)
    return verified


@piece
def _check_digest(buffers, batch, phase, request, row, last):
    """Compare the chain after a prefix's last token with the engine's own digest of its tokens."""
    slot = slot_at(batch, row, last)
    record = record_at(buffers, slot)
    if not record:
        return
    identity = load_int64(record, _IDENTITY)
    if not _is_complete(record) or position_of(identity) != last:
        return
    wanted, found = column(batch, DIGESTS, request), continued(record, last)
    if found != wanted:
        report(buffers, phase * _NUM_REASONS + _TOKEN, (slot, last, request), 0, wanted, found)


@piece
def _check_known(buffers, batch, request, stop):
    """Compare the chain after the tokens that the scheduler knows with its digest; 1 = compared, else 0."""
    row, length = column(batch, ROWS, request), column(batch, KNOWN_LENS, request)
    if not (0 <= row < load_int64(batch, NUM_ROWS) and 0 < length <= stop):
        return 0
    if length + _KNOWN_LAG <= column(batch, PREFIX_LENS, request):
        return 0
    slot = slot_at(batch, row, length - 1)
    record = record_at(buffers, slot)
    if not _is_complete(record) or position_of(load_int64(record, _IDENTITY)) != length - 1:
        return 0
    wanted, found = column(batch, KNOWN_DIGESTS, request), continued(record, length - 1)
    if found != wanted:
        lane = _TAIL * _NUM_REASONS + _WRITE_TOKEN
        report(buffers, lane, (slot, length - 1, request), 0, wanted, found)
    return 1


@piece
def _compare_known(buffers, batch, capacity):
    """Compare every request's tokens with what the scheduler knows of them, or count it as left out."""
    compared = 0
    for request in range(load_int64(batch, NUM_REQUESTS)):
        stop = column(batch, PREFIX_LENS, request) + column(batch, EXTEND_LENS, request)
        compared += _check_known(buffers, batch, request, min(stop, capacity))
    count(buffers, _COUNT_TOKENS_COMPARED, compared)
    count(buffers, _COUNT_TOKENS_LEFT_OUT, load_int64(batch, NUM_REQUESTS) - compared)


@kernel("void(int64, int64, int64)")
def _verify_rows(buffers, batch, phase):
    capacity = load_int64(batch, WIDTH) * load_int64(batch, PAGE_SIZE)
    num_rows = load_int64(batch, NUM_ROWS)
    digests = load_int64(batch, HAS_DIGESTS) != 0
    verified = 0
    for request in range(load_int64(batch, NUM_REQUESTS)):
        row = column(batch, ROWS, request)
        if row < 0 or row >= num_rows:
            continue
        start = max(column(batch, STARTS, request), 0)
        prefix = column(batch, PREFIX_LENS, request)
        extend = 0 if phase == _HEAD else column(batch, EXTEND_LENS, request)
        stop = min(prefix + extend, capacity)
        if stop > start:
            verified += _check_span(buffers, batch, phase, request, row, start, stop)
        last = min(prefix, capacity) - 1
        # At the tail too where a request adds nothing: its prefix may have been PENDING at the head.
        if digests and last >= 0 and extend == 0:
            _check_digest(buffers, batch, phase, request, row, last)
    if phase == _TAIL and load_int64(batch, HAS_KNOWN):
        _compare_known(buffers, batch, capacity)
    count(buffers, _COUNT_VERIFIED + phase, verified)
    count(buffers, _COUNT_RUNS + phase, 1)


@kernel("void(int64, int64, int64, int64, int64, int64)")
def _verify_list(buffers, slots, positions, previous, length, phase):
    verified = 0
    for index in range(length):
        slot = load_int64(slots, index)
        if slot >= 0:
            position = load_int64(positions, index)
            before = record_at(buffers, load_int64(previous, index))
            place = (slot, position, _NO_REQUEST)
            verified += _judge(buffers, phase, place, record_at(buffers, slot), before)
    count(buffers, _COUNT_VERIFIED + phase, verified)
    count(buffers, _COUNT_RUNS + phase, 1)


def verify_rows(buffers: GroupBuffers, batch: RowBatch, phase: Phase) -> None:
    """Check the records of every request's prefix (HEAD) or prefix and new tokens (TAIL)."""
    _verify_rows(frame_of_buffers(buffers), frame_of_batch(batch), int(phase))


def verify_list(
    buffers: GroupBuffers, slots: Tensor, positions: Tensor, previous: Tensor, phase: Phase
) -> None:
    """Check the records of listed slots, each against the slot of the position before it."""
    columns = [tensor.to(torch.int64).contiguous() for tensor in (slots, positions, previous)]
    addresses = [tensor.data_ptr() for tensor in columns]
    _verify_list(frame_of_buffers(buffers), *addresses, slots.numel(), int(phase))
