"""Verify on the CPU: one pass says that all is well; only if not, every record is classified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from canary_kernels.hashing import flaws_of, mix_arrays
from canary_kernels.layout import (
    CHAIN,
    CHAIN_ANCHOR,
    COUNT_RUNS,
    COUNT_TOKENS_COMPARED,
    COUNT_TOKENS_LEFT_OUT,
    COUNT_UNVERIFIED,
    COUNT_VERIFIED,
    IDENTITY,
    KNOWN_LAG,
    MAX_POSITION,
    NO_REQUEST,
    NUM_UNVERIFIED,
    STATE_AND_POSITION_MASK,
    STATE_BITS,
    STATE_MASK,
    Part,
    Phase,
    Reason,
    RecordState,
    Unverified,
)
from canary_kernels.violations import report_where

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers, RowBatch
    from canary_kernels.hashing import Integers, Words

    Longs = NDArray[np.int64]

_ANCHOR = np.uint64(CHAIN_ANCHOR)
# IDENTITY as two 32-bit halves of a little-endian word.
_TOKEN, _META = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans:
    """The prefixes of a batch that are not empty, laid end to end."""

    requests: Longs  # [spans]; index in the batch
    rows: Longs  # [spans]; row of the slot table
    starts: Longs  # [spans]; first position
    counts: Longs  # [spans]; positions, > 0
    offsets: Longs  # [spans]; place of the first position
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Records:
    """What a check reads of some records; all 0 for slots out of range."""

    tokens: NDArray[np.int32]  # [n]
    meta: NDArray[np.int32]  # [n]; check, position << STATE_BITS | state
    chain: Words  # [n]
    flaws: Longs  # [n]; 0 where the record's check of itself holds

    @property
    def states(self) -> NDArray[np.int32]:
        """[n]: RecordState; -1 where the check does not hold."""
        return np.where(self.flaws == 0, self.meta & STATE_MASK, -1)

    @property
    def positions(self) -> NDArray[np.int32]:
        """[n]: stored positions."""
        return self.meta >> STATE_BITS & MAX_POSITION

    def continued(self, positions: Longs) -> Words:
        """[n]: the chain after each record, were it at these positions."""
        return mix_arrays(self.tokens, positions) + self.chain


def verify_rows(buffers: GroupBuffers, batch: RowBatch, phase: Phase) -> None:
    """Check the records of every request's prefix (HEAD) or prefix and new tokens (TAIL)."""
    spans = _spans_of(batch, phase)
    counters = buffers.counters.numpy()
    digests = batch.digests.numpy() if phase is Phase.HEAD and batch.digests is not None else None
    if spans.total:
        places = np.arange(spans.total)
        positions = np.repeat(spans.starts - spans.offsets, spans.counts)
        positions += places
        slots = _lookup(batch, np.repeat(spans.rows, spans.counts), positions)
        if _in_range(buffers, slots) and _all_clean(spans, positions, _at(buffers, slots), digests):
            counters[COUNT_VERIFIED + phase] += spans.total
            if _digests_covered(batch, spans):
                digests = None
        else:
            requests = np.repeat(spans.requests, spans.counts)
            previous = np.roll(slots, 1)
            previous[spans.offsets] = -1
            _check(buffers, phase, (slots, positions, previous), requests)
    if digests is not None:
        _check_digests(buffers, batch, digests, phase)
    elif phase is Phase.TAIL and batch.digests is not None:
        _check_digests(buffers, batch, batch.digests.numpy(), phase)
    if phase is Phase.TAIL and batch.known_lens is not None and batch.known_digests is not None:
        _check_known(buffers, batch, batch.known_lens.numpy(), batch.known_digests.numpy())
    counters[COUNT_RUNS + phase] += 1


def verify_list(
    buffers: GroupBuffers, slots: Tensor, positions: Tensor, previous: Tensor, phase: Phase
) -> None:
    """Check the records of listed slots, each against the slot of the position before it."""
    listed = slots.numpy() >= 0
    columns = [column.numpy()[listed].astype(np.int64) for column in (slots, positions, previous)]
    _check(buffers, phase, (columns[0], columns[1], columns[2]), NO_REQUEST)
    buffers.counters[COUNT_RUNS + phase] += 1


def _spans_of(batch: RowBatch, phase: Phase) -> _Spans:
    table = batch.slot_table
    rows, starts = batch.rows.numpy(), batch.starts.numpy()
    ends = batch.prefix_lens.numpy().astype(np.int64)  # int32 would wrap, and hide a length out of range
    if phase is not Phase.HEAD:
        ends = ends + batch.extend_lens.numpy()
    starts = np.maximum(starts, 0)
    counts = np.minimum(ends, table.shape[1] * batch.page_size) - starts
    (live,) = np.nonzero((counts > 0) & (rows >= 0) & (rows < table.shape[0]))
    counts = counts[live].astype(np.int64)
    totals = counts.cumsum()
    return _Spans(
        requests=live,
        rows=rows[live].astype(np.int64),
        starts=starts[live].astype(np.int64),
        counts=counts,
        offsets=totals - counts,
        total=int(totals[-1]) if live.shape[0] else 0,
    )


def _lookup(batch: RowBatch, rows: Longs, positions: Longs) -> Longs:
    """[n]: slots through the slot table; negative or too large where the table holds such values."""
    table, page_size = batch.slot_table, batch.page_size
    stride = table.stride(0)
    cells = table.as_strided(((table.shape[0] - 1) * stride + table.shape[1],), (1,)).numpy()
    index = rows * stride
    if page_size == 1:
        index += positions
        return cells.take(index).astype(np.int64)
    pages = positions // page_size
    index += pages
    slots = cells.take(index).astype(np.int64)
    slots -= pages
    slots *= page_size
    slots += positions
    return slots


def _in_range(buffers: GroupBuffers, slots: Longs) -> bool:
    # As unsigned, negative slots are too large.
    return int(slots.view(np.uint64).max()) < buffers.num_slots


def _at(buffers: GroupBuffers, slots: Longs) -> _Records:
    """The records of slots that are all in range."""
    records = buffers.records.numpy().take(slots, 0)
    halves = records.view(np.int32)
    return _Records(
        tokens=halves[:, _TOKEN],
        meta=halves[:, _META],
        chain=records[:, CHAIN].view(np.uint64),
        flaws=flaws_of(records[:, IDENTITY], records[:, CHAIN]),
    )


def _read(buffers: GroupBuffers, slots: Longs) -> _Records:
    """The records of slots; zeros for those out of range."""
    known = (slots >= 0) & (slots < buffers.num_slots)
    records = _at(buffers, np.where(known, slots, 0))
    return _Records(
        tokens=np.where(known, records.tokens, 0),
        meta=np.where(known, records.meta, 0),
        chain=np.where(known, records.chain, np.uint64(0)),
        flaws=np.where(known, records.flaws, 0),
    )


def _all_clean(spans: _Spans, positions: Longs, records: _Records, digests: Integers | None) -> bool:
    """Whether every record is COMPLETE, holds its position and continues the one before it."""
    wanted = positions << STATE_BITS
    wanted += int(RecordState.COMPLETE)
    if not np.array_equal(records.meta & STATE_AND_POSITION_MASK, wanted) or records.flaws.any():
        return False
    continued = records.continued(positions)
    last = spans.offsets + spans.counts - 1
    following = np.empty_like(continued)
    following[:-1] = records.chain[1:]
    following[last] = continued[last] if digests is None else digests[spans.requests].astype(np.uint64)
    if not np.array_equal(continued, following):
        return False
    return bool((records.chain[spans.offsets[spans.starts == 0]] == _ANCHOR).all())


def _digests_covered(batch: RowBatch, spans: _Spans) -> bool:
    """Whether each request with a prefix has a span: a window may leave none of a prefix to verify."""
    with_prefix = (batch.rows.numpy() >= 0) & (batch.prefix_lens.numpy() > 0)
    return bool(with_prefix.sum() == spans.counts.shape[0])


def _check(
    buffers: GroupBuffers, phase: Phase, places: tuple[Longs, Longs, Longs], requests: Longs | int
) -> None:
    """Classify the records of (slots, positions, previous slots), count, and log what is wrong."""
    slots, positions, previous = places
    records, before = _read(buffers, slots), _read(buffers, previous)
    states = np.where((slots >= 0) & (slots < buffers.num_slots), records.states, -1)
    complete, pending = states == RecordState.COMPLETE, states == RecordState.PENDING
    baseline = states == RecordState.BASELINE
    adopted, awaited = states == RecordState.ADOPTED, states == RecordState.AWAITED
    if phase is Phase.HEAD:  # this very forward writes them, or brings their bytes
        pending |= awaited
    else:
        adopted |= awaited
    damaged = records.flaws != 0
    unwritten = ~(complete | adopted | baseline | damaged)
    if phase is Phase.HEAD:
        unwritten &= ~pending
        _count_unverified(buffers, phase, Unverified.PENDING, pending)
    _count_unverified(buffers, phase, Unverified.ADOPTED, adopted)
    _count_unverified(buffers, phase, Unverified.BASELINE, baseline)
    buffers.counters[COUNT_VERIFIED + phase] += int(complete.sum())

    stored = records.positions.astype(np.int64)
    misplaced = complete & (stored != positions)
    linked = (before.states == RecordState.COMPLETE) & (positions > 0)
    expected = np.where(positions > 0, before.continued(positions - 1), _ANCHOR)
    unlinked = complete & ~misplaced & (linked | (positions == 0)) & (records.chain != expected)
    for reason, mask, wanted, found in (
        (Reason.RECORD, damaged, 0, records.flaws),
        (Reason.UNWRITTEN, unwritten, int(RecordState.COMPLETE), states.astype(np.int64)),
        (Reason.POSITION, misplaced, positions, stored),
        (Reason.CHAIN, unlinked, expected.view(np.int64), records.chain.view(np.int64)),
    ):
        columns = slots, positions, requests, wanted, found
        report_where(buffers, (phase, reason, Part.IDENTITY), mask, columns)


def _count_unverified(
    buffers: GroupBuffers, phase: Phase, cause: Unverified, mask: NDArray[np.bool_]
) -> None:
    buffers.counters[COUNT_UNVERIFIED + phase * NUM_UNVERIFIED + cause] += int(mask.sum())


def _check_digests(buffers: GroupBuffers, batch: RowBatch, digests: Integers, phase: Phase) -> None:
    """Compare the chain after each prefix's last token with the engine's own digest of its tokens.

    At TAIL only where a request adds nothing: its prefix may have been PENDING at HEAD.
    """
    table, rows = batch.slot_table, batch.rows.numpy().astype(np.int64)
    last = np.minimum(batch.prefix_lens.numpy().astype(np.int64), table.shape[1] * batch.page_size) - 1
    asked = (rows >= 0) & (rows < table.shape[0]) & (last >= 0)
    if phase is Phase.TAIL:
        asked &= batch.extend_lens.numpy() == 0
    (live,) = np.nonzero(asked)
    last, wanted = last[live], digests[live].astype(np.int64)
    slots = _lookup(batch, rows[live], last) if live.shape[0] else last
    records = _read(buffers, slots)
    found = records.continued(last).view(np.int64)
    readable = (records.states == RecordState.COMPLETE) & (records.positions == last)
    columns = slots, last, live, wanted, found
    report_where(buffers, (phase, Reason.TOKEN, Part.IDENTITY), readable & (found != wanted), columns)


def _check_known(buffers: GroupBuffers, batch: RowBatch, lens: Integers, digests: Integers) -> None:
    """Compare the chain after the tokens that the scheduler knows with its digest of them."""
    table, rows = batch.slot_table, batch.rows.numpy()
    prefix = batch.prefix_lens.numpy().astype(np.int64)
    stop = np.minimum(prefix + batch.extend_lens.numpy(), table.shape[1] * batch.page_size)
    known = (rows >= 0) & (rows < table.shape[0]) & (lens > 0) & (lens <= stop) & (lens + KNOWN_LAG > prefix)
    (requests,) = np.nonzero(known)
    last = lens[requests].astype(np.int64) - 1
    slots = _lookup(batch, rows[requests].astype(np.int64), last) if requests.size else last
    records = _read(buffers, slots)
    readable = (records.states == RecordState.COMPLETE) & (records.positions == last)
    found, wanted = records.continued(last).view(np.int64), digests[requests].astype(np.int64)
    check = Phase.TAIL, Reason.WRITE_TOKEN, Part.IDENTITY
    report_where(buffers, check, readable & (found != wanted), (slots, last, requests, wanted, found))
    compared = int(readable.sum())
    buffers.counters[COUNT_TOKENS_COMPARED] += compared
    buffers.counters[COUNT_TOKENS_LEFT_OUT] += rows.shape[0] - compared
