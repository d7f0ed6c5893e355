"""Verify in PyTorch: one pass says that all is well; only if not, every record is classified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from canary_kernels.hashing import mix64
from canary_kernels.layout import (
    CHAIN,
    CHAIN_ANCHOR,
    COUNT_RUNS,
    COUNT_UNVERIFIED,
    COUNT_VERIFIED,
    IDENTITY,
    NO_REQUEST,
    NUM_UNVERIFIED,
    STATE_BITS,
    STATE_MASK,
    Part,
    Phase,
    Reason,
    RecordState,
    Unverified,
    signed,
)
from canary_kernels.violations import report, rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers, RowBatch

_ANCHOR = signed(CHAIN_ANCHOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans:
    """The prefixes of a batch that are not empty, laid end to end."""

    requests: Tensor  # int64 [spans]; index in the batch
    rows: Tensor  # int64 [spans]; row of the slot table
    starts: Tensor  # int64 [spans]; first position
    counts: Tensor  # int64 [spans]; positions, > 0
    offsets: Tensor  # int64 [spans]; place of the first position
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checks:
    """Records to check, each with the record of the position before it."""

    slots: Tensor  # int64 [n]
    positions: Tensor  # int64 [n]
    requests: Tensor | int  # int64 [n]; index in the batch
    identity: Tensor  # int64 [n]; 0 where the slot is out of range
    chain: Tensor  # int64 [n]
    previous_identity: Tensor  # int64 [n]; 0 = nothing to link to
    previous_chain: Tensor  # int64 [n]


def verify_rows(buffers: GroupBuffers, batch: RowBatch, phase: Phase) -> None:
    """Check the records of every request's prefix (HEAD) or prefix and new tokens (TAIL)."""
    spans = _spans_of(batch, phase)
    digests = batch.digests if phase is Phase.HEAD else None
    if spans.total:
        repeat = torch.repeat_interleave(spans.counts, output_size=spans.total)
        places = torch.arange(spans.total)
        positions = (spans.starts - spans.offsets)[repeat].add_(places)
        slots = _lookup(batch, spans.rows[repeat], positions)
        records = _gather(buffers, slots)
        if records is not None and _all_clean(spans, positions, records, digests):
            buffers.counters[COUNT_VERIFIED + phase] += spans.total
            digests = None if _digests_covered(batch, spans) else digests
        else:
            _check(buffers, phase, _link_rows(buffers, spans, repeat, slots, positions))
    if digests is not None:
        _check_digests(buffers, batch, digests)
    buffers.counters[COUNT_RUNS + phase] += 1


def verify_list(
    buffers: GroupBuffers, slots: Tensor, positions: Tensor, previous: Tensor, phase: Phase
) -> None:
    """Check the records of listed slots, each against the slot of the position before it."""
    listed = slots >= 0
    slots, positions, previous = (column.long()[listed] for column in (slots, positions, previous))
    identity, chain = _read(buffers, slots)
    previous_identity, previous_chain = _read(buffers, previous)
    checks = _Checks(
        slots=slots,
        positions=positions,
        requests=NO_REQUEST,
        identity=identity,
        chain=chain,
        previous_identity=previous_identity,
        previous_chain=previous_chain,
    )
    _check(buffers, phase, checks)
    buffers.counters[COUNT_RUNS + phase] += 1


def _spans_of(batch: RowBatch, phase: Phase) -> _Spans:
    table = batch.slot_table
    rows, starts, ends = batch.rows.long(), batch.starts.long().clamp(min=0), batch.prefix_lens.long()
    if phase is not Phase.HEAD:
        ends = ends + batch.extend_lens
    counts = ends.clamp(max=table.shape[1] * batch.page_size) - starts
    live = ((counts > 0) & (rows >= 0) & (rows < table.shape[0])).nonzero().squeeze(1)
    counts = counts[live]
    ends = counts.cumsum(0)
    return _Spans(
        requests=live,
        rows=rows[live],
        starts=starts[live],
        counts=counts,
        offsets=ends - counts,
        total=int(ends[-1]) if live.shape[0] else 0,
    )


def _lookup(batch: RowBatch, rows: Tensor, positions: Tensor) -> Tensor:
    """int64 [n]: slots through the slot table; negative or too large where the table holds such values."""
    table, page_size = batch.slot_table, batch.page_size
    stride = table.stride(0)
    cells = table.as_strided(((table.shape[0] - 1) * stride + table.shape[1],), (1,))
    if page_size == 1:
        return cells.index_select(0, torch.add(positions, rows, alpha=stride)).long()
    pages = torch.div(positions, page_size, rounding_mode="floor")
    offsets = positions - pages * page_size
    return offsets.add_(cells.index_select(0, pages.add_(rows, alpha=stride)), alpha=page_size)


def _gather(buffers: GroupBuffers, slots: Tensor) -> Tensor | None:
    """int64 [n, RECORD_WORDS]; None when a slot is out of range."""
    low, high = torch.aminmax(slots)
    if int(low) < 0 or int(high) >= buffers.num_slots:
        return None
    return buffers.records.index_select(0, slots)


def _all_clean(spans: _Spans, positions: Tensor, records: Tensor, digests: Tensor | None) -> bool:
    """Whether every record is COMPLETE, holds its position and continues the one before it."""
    identity, chain = records[:, IDENTITY], records[:, CHAIN]
    if not torch.equal(identity >> 32, (positions << STATE_BITS).add_(int(RecordState.COMPLETE))):
        return False
    continued = mix64((identity << 32) >> 32, positions).add_(chain)
    last = spans.offsets + spans.counts - 1
    following = torch.empty_like(continued)
    following[:-1] = chain[1:]
    following[last] = continued[last] if digests is None else digests[spans.requests].long()
    at_anchor = chain[spans.offsets[spans.starts == 0]]
    return torch.equal(continued, following) and bool((at_anchor == _ANCHOR).all())


def _digests_covered(batch: RowBatch, spans: _Spans) -> bool:
    """Whether each request with a prefix has a span: a window may leave none of a prefix to verify."""
    return int(((batch.rows >= 0) & (batch.prefix_lens > 0)).sum()) == spans.counts.shape[0]


def _link_rows(
    buffers: GroupBuffers, spans: _Spans, repeat: Tensor, slots: Tensor, positions: Tensor
) -> _Checks:
    identity, chain = _read(buffers, slots)
    previous_identity, previous_chain = identity.roll(1), chain.roll(1)
    previous_identity[spans.offsets] = 0
    return _Checks(
        slots=slots,
        positions=positions,
        requests=spans.requests[repeat],
        identity=identity,
        chain=chain,
        previous_identity=previous_identity,
        previous_chain=previous_chain,
    )


def _read(buffers: GroupBuffers, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Identity and chain; 0 for slots out of range."""
    known = (slots >= 0) & (slots < buffers.num_slots)
    records = buffers.records[slots.where(known, 0)]
    return records[:, IDENTITY].where(known, 0), records[:, CHAIN].where(known, 0)


def _continued(identity: Tensor, chain: Tensor, positions: Tensor) -> Tensor:
    return mix64((identity << 32) >> 32, positions) + chain


def _state(identity: Tensor) -> Tensor:
    return (identity >> 32) & STATE_MASK


def _position(identity: Tensor) -> Tensor:
    return identity >> (32 + STATE_BITS)


def _check(buffers: GroupBuffers, phase: Phase, checks: _Checks) -> None:
    """Classify every record, count, and log what is wrong."""
    state, positions = _state(checks.identity), checks.positions
    known = (checks.slots >= 0) & (checks.slots < buffers.num_slots)
    complete, pending = state == RecordState.COMPLETE, state == RecordState.PENDING
    adopted = state == RecordState.ADOPTED
    unwritten = ~(complete | adopted)
    if phase is Phase.HEAD:  # this very batch writes them
        unwritten &= ~pending
        _count_unverified(buffers, phase, Unverified.PENDING, pending)
    _count_unverified(buffers, phase, Unverified.ADOPTED, adopted)
    buffers.counters[COUNT_VERIFIED + phase] += complete.sum()

    misplaced = complete & (_position(checks.identity) != positions)
    linked = (_state(checks.previous_identity) == RecordState.COMPLETE) & (positions > 0)
    expected = _continued(checks.previous_identity, checks.previous_chain, positions - 1)
    expected = expected.where(positions > 0, _ANCHOR)
    unlinked = complete & ~misplaced & (linked | (positions == 0)) & (checks.chain != expected)
    for reason, mask, wanted, found in (
        (Reason.UNWRITTEN, unwritten, torch.tensor(int(RecordState.COMPLETE)), state.where(known, -1)),
        (Reason.POSITION, misplaced, positions, _position(checks.identity)),
        (Reason.CHAIN, unlinked, expected, checks.chain),
    ):
        rows = rows_of(mask, checks.requests, Part.IDENTITY, checks.slots, positions, wanted, found)
        report(buffers, phase, reason, rows)


def _count_unverified(buffers: GroupBuffers, phase: Phase, cause: Unverified, mask: Tensor) -> None:
    buffers.counters[COUNT_UNVERIFIED + phase * NUM_UNVERIFIED + cause] += mask.sum()


def _check_digests(buffers: GroupBuffers, batch: RowBatch, digests: Tensor) -> None:
    """Compare the chain after each prefix's last token with the engine's own digest of its tokens."""
    table, rows = batch.slot_table, batch.rows.long()
    last = batch.prefix_lens.long().clamp(max=table.shape[1] * batch.page_size) - 1
    live = ((rows >= 0) & (rows < table.shape[0]) & (last >= 0)).nonzero().squeeze(1)
    if live.shape[0] == 0:
        return
    last, wanted = last[live], digests[live].long()
    slots = _lookup(batch, rows[live], last)
    identity, chain = _read(buffers, slots)
    found = _continued(identity, chain, last)
    readable = (_state(identity) == RecordState.COMPLETE) & (_position(identity) == last)
    mask = readable & (found != wanted)
    rows_ = rows_of(mask, live, Part.IDENTITY, slots, last, wanted, found)
    report(buffers, Phase.HEAD, Reason.TOKEN, rows_)
