"""Write in PyTorch: chains of all requests by one running sum over the new tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from canary_kernels.hashing import mix64
from canary_kernels.layout import (
    CHAIN,
    CHAIN_ANCHOR,
    COUNT_WRITE_RUNS,
    COUNT_WRITTEN,
    IDENTITY,
    STATE_BITS,
    STATE_MASK,
    Part,
    Phase,
    Reason,
    RecordState,
    signed,
)
from canary_kernels.violations import report, rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers, RowBatch

_ANCHOR = signed(CHAIN_ANCHOR)
_LOW_WORD = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _NewTokens:
    """The new tokens of all live requests, request after request."""

    requests: Tensor  # int64 [n]; index in the batch
    ids: Tensor  # int64 [n]; int32 values
    positions: Tensor  # int64 [n]
    slots: Tensor  # int64 [n]; out of range = not written
    tokens: Tensor  # int64 [n]; index in the forward


def write_identities(buffers: GroupBuffers, batch: RowBatch) -> None:
    """Write PENDING records of the new tokens and check the forward's inputs."""
    rows, extend = batch.rows.long(), batch.extend_lens.long()
    live = ((rows >= 0) & (rows < batch.slot_table.shape[0]) & (extend > 0)).nonzero().squeeze(1)
    if live.shape[0]:
        counts, prefix = extend[live], batch.prefix_lens.long()[live]
        offsets = counts.cumsum(0) - counts
        repeat = torch.repeat_interleave(counts)
        places = torch.arange(repeat.shape[0])
        tokens = (batch.token_starts.long()[live] - offsets)[repeat].add_(places)
        new = _NewTokens(
            requests=live[repeat],
            ids=batch.input_ids.index_select(0, tokens).int().long(),
            positions=(prefix - offsets)[repeat].add_(places),
            slots=batch.out_slots.index_select(0, tokens).long(),
            tokens=tokens,
        )
        _check_inputs(buffers, batch, new)
        mixed = mix64(new.ids, new.positions)
        sums = mixed.cumsum(0).sub_(mixed)
        starts = _chain_starts(buffers, batch, live, prefix)
        _store(buffers, new, sums.add_((starts - sums[offsets])[repeat]))
    buffers.counters[COUNT_WRITE_RUNS] += 1


def _check_inputs(buffers: GroupBuffers, batch: RowBatch, new: _NewTokens) -> None:
    given = batch.positions.index_select(0, new.tokens).long()
    if not torch.equal(given, new.positions):
        wrong = given != new.positions
        columns = new.slots, new.positions, new.positions, given
        report(
            buffers, Phase.HEAD, Reason.WRITE_POSITION, rows_of(wrong, new.requests, Part.IDENTITY, *columns)
        )
    if batch.expected_ids is None:
        return
    wanted = batch.expected_ids.index_select(0, new.tokens).long()
    wrong = (wanted >= 0) & (wanted != new.ids)
    columns = new.slots, new.positions, wanted, new.ids
    report(buffers, Phase.HEAD, Reason.WRITE_TOKEN, rows_of(wrong, new.requests, Part.IDENTITY, *columns))


def _chain_starts(buffers: GroupBuffers, batch: RowBatch, live: Tensor, prefix: Tensor) -> Tensor:
    """int64 [spans]: the chain at each request's first new position."""
    if batch.digests is not None:
        return batch.digests[live].long().where(prefix > 0, _ANCHOR)
    last = (prefix - 1).clamp(min=0)
    pages = torch.div(last, batch.page_size, rounding_mode="floor")
    inside = (prefix > 0) & (pages < batch.slot_table.shape[1])
    cells = batch.slot_table[batch.rows.long()[live], pages.where(inside, 0)].long()
    slots = cells * batch.page_size + last % batch.page_size
    inside &= (slots >= 0) & (slots < buffers.num_slots)
    records = buffers.records[slots.where(inside, 0)]
    identity = records[:, IDENTITY]
    continued = mix64((identity << 32) >> 32, last) + records[:, CHAIN]
    return continued.where(inside, _ANCHOR)


def _store(buffers: GroupBuffers, new: _NewTokens, chain: Tensor) -> None:
    meta = (new.positions << STATE_BITS) | int(RecordState.PENDING)
    identity = (new.ids & _LOW_WORD) | (meta << 32)
    low, high = torch.aminmax(new.slots)
    slots = new.slots
    if int(low) < 0 or int(high) >= buffers.num_slots:
        written = (slots >= 0) & (slots < buffers.num_slots)
        slots, identity, chain = slots[written], identity[written], chain[written]
    old = buffers.records.index_select(0, slots)
    # Equal but for the state: the bytes may rightly stay as they are, so they are no witness.
    complete = ((old[:, IDENTITY] >> 32) & STATE_MASK) == RecordState.COMPLETE
    replaced = complete & ((old[:, IDENTITY] ^ identity) & ~(STATE_MASK << 32) != 0)
    old[:, CHAIN + 1 :] *= replaced.unsqueeze(1)
    old[:, IDENTITY], old[:, CHAIN] = identity, chain
    buffers.records.index_copy_(0, slots, old)
    buffers.counters[COUNT_WRITTEN] += slots.shape[0]
