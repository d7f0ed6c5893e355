"""Fingerprint in PyTorch: gather the bytes of slots over all layers, multiply by keys, sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from canary_kernels.layout import (
    COUNT_COMPLETE_RUNS,
    COUNT_COMPLETED,
    COUNT_HASHED,
    COUNT_RUNS,
    COUNT_UNVERIFIED,
    FINGERPRINT_K,
    IDENTITY,
    NO_REQUEST,
    NUM_UNVERIFIED,
    STATE_BITS,
    STATE_MASK,
    Part,
    Phase,
    RealData,
    Reason,
    RecordState,
    Unverified,
)
from canary_kernels.violations import report, rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers
    from canary_kernels.fingerprint.plan import FingerprintPlan
    from canary_kernels.fingerprint.views import BundleView

_WORD_BYTES = 4
_CHUNK_BYTES = 1 << 24
_PENDING_TO_COMPLETE = (RecordState.COMPLETE - RecordState.PENDING) << 32


def hash_slots(plan: FingerprintPlan, slots: Tensor) -> Tensor:
    """int64 [n, 2]: fingerprints of K and V as the bytes are now; 0 for slots < 0."""
    known = slots >= 0
    if bool(known.all()):
        return _hash(plan, slots.long())
    hashes = torch.zeros((slots.shape[0], 2), dtype=torch.int64)
    hashes[known] = _hash(plan, slots[known].long())
    return hashes


def complete_slots(buffers: GroupBuffers, plan: FingerprintPlan, slots: Tensor) -> None:
    """Fingerprint PENDING records and make them COMPLETE."""
    slots = _inside(buffers, slots)
    if slots.shape[0]:
        records = buffers.records.index_select(0, slots)
        pending = _states(records) == RecordState.PENDING
        if not bool(pending.all()):
            slots, records = slots[pending], records[pending]
        hashes = _hash(plan, slots)
        witness = records[:, FINGERPRINT_K:]
        if plan.coverage is not RealData.NONE and bool(witness.any()):
            _report_lost(buffers, slots, records, hashes)
        records[:, FINGERPRINT_K:] = hashes
        records[:, IDENTITY] += _PENDING_TO_COMPLETE
        buffers.records.index_copy_(0, slots, records)
        buffers.counters[COUNT_COMPLETED] += slots.shape[0]
    buffers.counters[COUNT_COMPLETE_RUNS] += 1


def compare_slots(buffers: GroupBuffers, plan: FingerprintPlan, slots: Tensor, phase: Phase) -> None:
    """Compare COMPLETE records with the bytes of their slots."""
    slots = _inside(buffers, slots)
    if slots.shape[0]:
        records = buffers.records.index_select(0, slots)
        states = _states(records)
        if phase is Phase.PATROL:
            _count_unverified(buffers, phase, Unverified.ADOPTED, states == RecordState.ADOPTED)
            _count_unverified(buffers, phase, Unverified.PENDING, states == RecordState.PENDING)
        complete = states == RecordState.COMPLETE
        if plan.coverage is RealData.NONE:
            _count_unverified(buffers, phase, Unverified.NO_FINGERPRINT, complete)
        else:
            if not bool(complete.all()):
                slots, records = slots[complete], records[complete]
            _compare(buffers, slots, records, _hash(plan, slots), phase)
    if phase is Phase.PATROL:
        buffers.counters[COUNT_RUNS + phase] += 1


def _compare(buffers: GroupBuffers, slots: Tensor, records: Tensor, hashes: Tensor, phase: Phase) -> None:
    buffers.counters[COUNT_HASHED + phase] += slots.shape[0]
    stored = records[:, FINGERPRINT_K:]
    if torch.equal(stored, hashes):
        return
    for index, part in enumerate((Part.K, Part.V)):
        wrong = stored[:, index] != hashes[:, index]
        columns = slots, _positions(records), stored[:, index], hashes[:, index]
        report(buffers, phase, Reason.KV_DATA, rows_of(wrong, NO_REQUEST, part, *columns))


def _report_lost(buffers: GroupBuffers, slots: Tensor, records: Tensor, hashes: Tensor) -> None:
    witness = records[:, FINGERPRINT_K:]
    lost = witness.any(1) & (witness == hashes).all(1)
    columns = slots, _positions(records), witness[:, 0], hashes[:, 0]
    report(buffers, Phase.TAIL, Reason.LOST_WRITE, rows_of(lost, NO_REQUEST, Part.K, *columns))


def _count_unverified(buffers: GroupBuffers, phase: Phase, cause: Unverified, mask: Tensor) -> None:
    buffers.counters[COUNT_UNVERIFIED + phase * NUM_UNVERIFIED + cause] += mask.sum()


def _inside(buffers: GroupBuffers, slots: Tensor) -> Tensor:
    """int64 [n]: the slots that have records."""
    slots = slots.long()
    if slots.shape[0] == 0:
        return slots
    low, high = torch.aminmax(slots)
    if int(low) >= 0 and int(high) < buffers.num_slots:
        return slots
    return slots[(slots >= 0) & (slots < buffers.num_slots)]


def _states(records: Tensor) -> Tensor:
    return (records[:, IDENTITY] >> 32) & STATE_MASK


def _positions(records: Tensor) -> Tensor:
    return records[:, IDENTITY] >> (32 + STATE_BITS)


def _hash(plan: FingerprintPlan, slots: Tensor) -> Tensor:
    """int64 [n, 2]; all slots inside the sources' memory."""
    hashes = torch.zeros((slots.shape[0], 2), dtype=torch.int64)
    for view in plan.views:
        step = max(1, _CHUNK_BYTES // (view.num_sources * view.word_keys.shape[0] * _WORD_BYTES))
        for start in range(0, slots.shape[0], step):
            hashes[start : start + step] += _hash_bundle(view, slots[start : start + step])
    return hashes


def _hash_bundle(view: BundleView, slots: Tensor) -> Tensor:
    words = _words(view, slots).numpy().view(np.uint32)
    # einsum widens to 64 bits while it sums: no temporary of twice the size.
    sums = np.einsum("snw,w->ns", words, view.word_keys.numpy().view(np.uint64))
    return torch.from_numpy(np.matmul(sums, view.source_keys.numpy().view(np.uint64)).view(np.int64))


def _words(view: BundleView, slots: Tensor) -> Tensor:
    """int32 [sources, n, words], padded with zeros to whole words."""
    count = slots.shape[0]
    unit = view.stacks[0].element_size()
    gathered = torch.empty((view.num_sources, count, -(-view.num_bytes // unit)), dtype=view.stacks[0].dtype)
    first = 0
    for stack in view.stacks:
        into = gathered[first : first + stack.shape[0]]
        if view.page_size == 1 and stack.shape[2:4] == (1, 1):
            torch.index_select(stack[:, :, 0, 0], 1, slots, out=into)
        else:
            into.copy_(_gather_scattered(view, stack, slots))
        first += stack.shape[0]
    if unit == _WORD_BYTES:
        return gathered
    padding = -view.num_bytes % _WORD_BYTES
    return torch.nn.functional.pad(gathered, (0, padding)).view(torch.int32)


def _gather_scattered(view: BundleView, stack: Tensor, slots: Tensor) -> Tensor:
    if view.page_size == 1:
        found = stack[:, slots]
    else:
        found = stack[:, slots // view.page_size, slots % view.page_size]
    return found.flatten(2)[:, :, : -(-view.num_bytes // stack.element_size())]
