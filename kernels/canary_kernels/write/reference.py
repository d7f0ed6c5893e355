"""Write on the CPU: chains of all requests by one running sum over the new tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from canary_kernels.hashing import mix_arrays, sealed_arrays
from canary_kernels.layout import (
    CHAIN,
    CHAIN_ANCHOR,
    COUNT_WRITE_RUNS,
    COUNT_WRITTEN,
    IDENTITY,
    MAX_POSITION,
    STATE_BITS,
    STATE_MASK,
    TOKEN_MASK,
    Part,
    Phase,
    Reason,
    RecordState,
    identity_of,
)
from canary_kernels.violations import report_where

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers, RowBatch
    from canary_kernels.hashing import Words

    Longs = NDArray[np.int64]

_ANCHOR = np.uint64(CHAIN_ANCHOR)
_ADOPTED = int(RecordState.ADOPTED) << 32  # without its check


@dataclass(frozen=True, slots=True, kw_only=True)
class _NewTokens:
    """The new tokens of all live requests, request after request."""

    requests: Longs  # [n]; index in the batch
    ids: NDArray[np.int32]  # [n]
    positions: Longs  # [n]
    slots: Longs  # [n]; out of range = not written
    tokens: Longs  # [n]; index in the forward


def write_identities(buffers: GroupBuffers, batch: RowBatch) -> None:
    """Write PENDING records of the new tokens and check the forward's inputs."""
    rows, extend = batch.rows.numpy(), batch.extend_lens.numpy()
    (live,) = np.nonzero((rows >= 0) & (rows < batch.slot_table.shape[0]))
    live = live[_inside(buffers, batch, live)]
    live = live[extend[live] > 0]
    if live.shape[0]:
        counts = extend[live].astype(np.int64)
        prefix = batch.prefix_lens.numpy()[live].astype(np.int64)
        ends = counts.cumsum()
        offsets = ends - counts
        places = np.arange(int(ends[-1]))
        tokens = np.repeat(batch.token_starts.numpy()[live] - offsets, counts) + places
        new = _NewTokens(
            requests=np.repeat(live, counts),
            ids=batch.input_ids.numpy()[tokens].astype(np.int32),
            positions=np.repeat(prefix - offsets, counts) + places,
            slots=batch.out_slots.numpy()[tokens].astype(np.int64),
            tokens=tokens,
        )
        _check_inputs(buffers, batch, new)
        mixed = mix_arrays(new.ids, new.positions)
        sums = mixed.cumsum() - mixed
        starts, linked = _chain_starts(buffers, batch, live, prefix)
        _store(buffers, new, sums + np.repeat(starts - sums[offsets], counts), np.repeat(linked, counts))
    buffers.counters.numpy()[COUNT_WRITE_RUNS] += 1


def _inside(buffers: GroupBuffers, batch: RowBatch, live: Longs) -> NDArray[np.bool_]:
    """Which requests' lengths lie within the table and the forward; the others are reported."""
    columns = batch.prefix_lens, batch.extend_lens, batch.token_starts
    prefix, extend, first = (column.numpy()[live].astype(np.int64) for column in columns)
    capacity, tokens = batch.slot_table.shape[1] * batch.page_size, batch.input_ids.shape[0]
    inside = (prefix >= 0) & (prefix <= capacity) & (extend >= 0) & (extend <= tokens)
    inside &= (extend == 0) | ((first >= 0) & (first <= tokens - extend))
    check = Phase.HEAD, Reason.WRITE_POSITION, Part.IDENTITY
    nowhere = np.full_like(prefix, -1)
    report_where(buffers, check, ~inside, (nowhere, nowhere, live, capacity, prefix))
    return inside


def reset_slots(buffers: GroupBuffers, slots: Tensor, state: RecordState) -> None:
    """Leave nothing but the state."""
    places, records = slots.numpy(), buffers.records.numpy()
    places = places[(places >= 0) & (places < buffers.num_slots)]
    records[places] = 0
    records[places, IDENTITY] = identity_of(0, 0, state)


def _check_inputs(buffers: GroupBuffers, batch: RowBatch, new: _NewTokens) -> None:
    place = new.slots, new.positions, new.requests
    given = batch.positions.numpy()[new.tokens].astype(np.int64)
    check = Phase.HEAD, Reason.WRITE_POSITION, Part.IDENTITY
    report_where(buffers, check, given != new.positions, (*place, new.positions, given))
    if batch.expected_ids is not None:
        wanted = batch.expected_ids.numpy()[new.tokens].astype(np.int64)
        wrong = (wanted >= 0) & (wanted != new.ids)
        check = Phase.HEAD, Reason.WRITE_TOKEN, Part.IDENTITY
        report_where(buffers, check, wrong, (*place, wanted, new.ids))


def _chain_starts(
    buffers: GroupBuffers, batch: RowBatch, live: Longs, prefix: Longs
) -> tuple[Words, NDArray[np.bool_]]:
    """[spans] each: the chain at each request's first new position; whether it is known.

    Without digests it is that of the prefix's last record, which is not known while this forward writes it.
    """
    if batch.digests is not None:
        starts = np.where(prefix > 0, batch.digests.numpy()[live].astype(np.uint64), _ANCHOR)
        return starts, np.ones_like(starts, dtype=np.bool_)
    last = np.maximum(prefix - 1, 0)
    pages = last // batch.page_size
    inside = (prefix > 0) & (pages < batch.slot_table.shape[1])
    cells = batch.slot_table.numpy()[batch.rows.numpy()[live], np.where(inside, pages, 0)].astype(np.int64)
    slots = cells * batch.page_size + last % batch.page_size
    inside &= (slots >= 0) & (slots < buffers.num_slots)
    records = buffers.records.numpy()[np.where(inside, slots, 0)]
    continued = mix_arrays(records.view(np.int32)[:, 0], last) + records[:, CHAIN].view(np.uint64)
    return np.where(inside, continued, _ANCHOR), ~(inside & np.isin(slots, batch.out_slots.numpy()))


def _store(buffers: GroupBuffers, new: _NewTokens, chain: Words, linked: NDArray[np.bool_]) -> None:
    """Write PENDING records, or ADOPTED ones where the chain before them is not known."""
    identity = (new.positions & MAX_POSITION) << STATE_BITS | int(RecordState.PENDING)
    identity <<= 32
    identity |= new.ids.view(np.uint32)
    identity, chain = np.where(linked, identity, _ADOPTED), np.where(linked, chain, np.uint64(0))
    slots = new.slots
    if int(slots.view(np.uint64).max()) >= buffers.num_slots:
        written = (slots >= 0) & (slots < buffers.num_slots)
        slots, identity, chain, linked = slots[written], identity[written], chain[written], linked[written]
    records = buffers.records.numpy()
    new_records = records.take(slots, 0)
    old = new_records[:, IDENTITY]
    # An equal token may rightly leave equal bytes, elsewhere too (ALiBi, no rotation): no witness.
    replaced = ((old ^ identity) & TOKEN_MASK) != 0
    replaced &= ((old >> 32) & STATE_MASK) == RecordState.COMPLETE
    replaced &= linked
    new_records[~replaced, CHAIN + 1 :] = 0
    new_records[:, CHAIN] = chain.view(np.int64)
    new_records[:, IDENTITY] = sealed_arrays(identity, new_records[:, CHAIN])
    records[slots] = new_records
    buffers.counters.numpy()[COUNT_WRITTEN] += slots.shape[0]
