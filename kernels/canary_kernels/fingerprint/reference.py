"""Fingerprint on the CPU: gather the bytes of slots over all layers, multiply by keys, sum."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from canary_kernels.buffers import WHOLE
from canary_kernels.hashing import flaws_of
from canary_kernels.layout import (
    ADOPTED_TO_BASELINE,
    CHAIN,
    COUNT_BASELINE_RUNS,
    COUNT_BASELINES,
    COUNT_CENSUS,
    COUNT_COMPLETE_RUNS,
    COUNT_COMPLETED,
    COUNT_HASHED,
    COUNT_RUNS,
    COUNT_UNCOMPLETED,
    COUNT_UNHASHED,
    COUNT_UNVERIFIED,
    FINGERPRINT_K,
    IDENTITY,
    MAX_POSITION,
    NO_REQUEST,
    NUM_UNVERIFIED,
    PENDING_TO_COMPLETE,
    STATE_BITS,
    STATE_MASK,
    Part,
    Phase,
    RealData,
    Reason,
    RecordState,
    Unverified,
)
from canary_kernels.violations import report_where

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers, Sharding
    from canary_kernels.fingerprint.plan import FingerprintPlan
    from canary_kernels.fingerprint.views import BundleView
    from canary_kernels.hashing import Words

    Longs = NDArray[np.int64]

_WORD_BYTES = 4
_CHUNK_BYTES = 1 << 24


def hash_slots(plan: FingerprintPlan, slots: Tensor) -> Tensor:
    """int64 [n, 2]: fingerprints of K and V as the bytes are now; 0 for slots outside the plan's memory."""
    listed = slots.numpy().astype(np.int64)
    known = (listed >= 0) & (listed < (plan.num_slots or 0))
    hashes = np.zeros((listed.shape[0], 2), dtype=np.int64)
    hashes[known] = _hash(plan, listed[known])
    return torch.from_numpy(hashes)


def complete_slots(buffers: GroupBuffers, plan: FingerprintPlan, slots: Tensor) -> None:
    """Fingerprint PENDING records and make them COMPLETE."""
    counters, records = buffers.counters.numpy(), buffers.records.numpy()
    listed = _inside(buffers, slots)
    found = records.take(listed, 0)
    pending = _states(found) == RecordState.PENDING
    if not pending.all():
        listed, found = listed[pending], found[pending]
    if listed.shape[0]:
        hashes, witness = _hash(plan, listed), found[:, FINGERPRINT_K:]
        if plan.coverage is not RealData.NONE and witness.any():
            lost = witness.any(1) & (witness == hashes).all(1)
            columns = listed, _positions(found), NO_REQUEST, witness[:, 0], hashes[:, 0]
            report_where(buffers, (Phase.TAIL, Reason.LOST_WRITE, Part.K), lost, columns)
        found[:, FINGERPRINT_K:] = hashes
        found[:, IDENTITY] ^= PENDING_TO_COMPLETE
        records[listed] = found
        counters[COUNT_COMPLETED] += listed.shape[0]
    counters[COUNT_UNCOMPLETED] += slots.numel() - listed.shape[0]
    counters[COUNT_COMPLETE_RUNS] += 1


def baseline_slots(buffers: GroupBuffers, plan: FingerprintPlan, slots: Tensor) -> None:
    """Fingerprint ADOPTED records and make them BASELINE."""
    counters, records = buffers.counters.numpy(), buffers.records.numpy()
    counters[COUNT_BASELINE_RUNS] += 1
    listed = _inside(buffers, slots)
    found = records.take(listed, 0)
    states, sound = _states(found), _flaws(found) == 0
    adopted = (states == RecordState.ADOPTED) & sound
    if plan.coverage is RealData.NONE:
        adopted[:] = False
    states[adopted] = RecordState.BASELINE
    for state in (RecordState.ADOPTED, RecordState.BASELINE, RecordState.AWAITED):
        counters[COUNT_CENSUS + state] += ((states == state) & sound).sum()
    listed, found = listed[adopted], found[adopted]
    if listed.shape[0]:
        found[:, FINGERPRINT_K:] = _hash(plan, listed)
        found[:, IDENTITY] ^= ADOPTED_TO_BASELINE
        records[listed] = found
        counters[COUNT_BASELINES] += listed.shape[0]


def compare_slots(buffers: GroupBuffers, plan: FingerprintPlan, slots: Tensor, phase: Phase) -> None:
    """Compare COMPLETE and BASELINE records with the bytes of their slots."""
    counters = buffers.counters.numpy()
    listed = _inside(buffers, slots)
    found = buffers.records.numpy().take(listed, 0)
    states, flaws = _states(found), _flaws(found)
    if flaws.any():
        if phase in (Phase.HEAD, Phase.PATROL, Phase.HIT):
            facts = listed, _positions(found), NO_REQUEST, 0, flaws
            report_where(buffers, (phase, Reason.RECORD, Part.IDENTITY), flaws != 0, facts)
        states[flaws != 0] = RecordState.EMPTY
    complete = (states == RecordState.COMPLETE) | (states == RecordState.BASELINE)
    causes = counters[COUNT_UNVERIFIED + phase * NUM_UNVERIFIED :]
    if phase is Phase.PATROL:
        causes[Unverified.ADOPTED] += (states == RecordState.ADOPTED).sum()
        causes[Unverified.ADOPTED] += (states == RecordState.AWAITED).sum()
        causes[Unverified.PENDING] += (states == RecordState.PENDING).sum()
    if phase in (Phase.PATROL, Phase.HIT):
        counters[COUNT_RUNS + phase] += 1
    if plan.coverage is RealData.NONE:
        causes[Unverified.NO_FINGERPRINT] += complete.sum()
        counters[COUNT_UNHASHED + phase] += slots.numel()
        return
    if not complete.all():
        listed, found = listed[complete], found[complete]
    counters[COUNT_HASHED + phase] += listed.shape[0]
    counters[COUNT_UNHASHED + phase] += slots.numel() - listed.shape[0]
    hashes, stored = _hash(plan, listed), found[:, FINGERPRINT_K:]
    if np.array_equal(stored, hashes):
        return
    for index, part in enumerate((Part.K, Part.V)):
        columns = listed, _positions(found), NO_REQUEST, stored[:, index], hashes[:, index]
        wrong = stored[:, index] != hashes[:, index]
        report_where(buffers, (phase, Reason.KV_DATA, part), wrong, columns)


def _inside(buffers: GroupBuffers, slots: Tensor) -> Longs:
    """[n]: the slots that have records."""
    listed = slots.numpy().astype(np.int64)
    # As unsigned, negative slots are too large.
    return listed[listed.view(np.uint64) < buffers.num_slots]


def _states(records: Longs) -> Longs:
    return (records[:, IDENTITY] >> 32) & STATE_MASK


def _positions(records: Longs) -> Longs:
    return (records[:, IDENTITY] >> (32 + STATE_BITS)) & MAX_POSITION


def _flaws(records: Longs) -> Longs:
    return flaws_of(records[:, IDENTITY], records[:, CHAIN])


def _hash(plan: FingerprintPlan, slots: Longs) -> Longs:
    """[n, 2]; all slots inside the sources' memory. 0 for those of other ranks."""
    if plan.sharding.ranks > 1:
        return _hash_sharded(plan, slots)
    hashes = np.zeros((slots.shape[0], 2), dtype=np.uint64)
    for view in plan.views:
        step = max(1, _CHUNK_BYTES // (view.num_sources * view.word_keys.shape[0] * _WORD_BYTES))
        for start in range(0, slots.shape[0], step):
            hashes[start : start + step] += _hash_bundle(view, slots[start : start + step])
    return hashes.view(np.int64)


def _hash_sharded(plan: FingerprintPlan, slots: Longs) -> Longs:
    sharding, held = plan.sharding, held_slots(plan.sharding, slots)
    hashes, own = np.zeros((slots.shape[0], 2), dtype=np.int64), slots[held]
    run = sharding.interleave
    hashes[held] = _hash(replace(plan, sharding=WHOLE), own // (run * sharding.ranks) * run + own % run)
    return hashes


def held_slots(sharding: Sharding, slots: Longs) -> NDArray[np.bool_]:
    """bool [n]: the slots whose bytes this rank has."""
    held: NDArray[np.bool_] = slots // sharding.interleave % sharding.ranks == sharding.rank
    return held


def _hash_bundle(view: BundleView, slots: Longs) -> Words:
    # einsum widens to 64 bits while it sums: no temporary of twice the size.
    sums: Words = np.einsum("snw,w->ns", _words(view, slots), view.word_keys)
    hashes: Words = np.matmul(sums, view.source_keys)
    return hashes


def _words(view: BundleView, slots: Longs) -> NDArray[np.uint32]:
    """[sources, n, words], padded with zeros to whole words."""
    unit = view.stacks[0].itemsize
    width = -(-view.num_bytes // unit)
    padding = 0 if unit == _WORD_BYTES else -width % _WORD_BYTES
    shape = view.num_sources, slots.shape[0], width + padding
    words = np.zeros(shape, view.stacks[0].dtype) if padding else np.empty(shape, view.stacks[0].dtype)
    first = 0
    for stack in view.stacks:
        into = words[first : first + stack.shape[0], :, :width]
        if view.page_size == 1 and stack.shape[2:5] == (1, 1, 1):
            _take_rows(stack[:, :, 0, 0, 0], slots, into)
        else:
            found = stack[_places(view, slots)]
            into[:] = found.reshape(*found.shape[:2], -1)[:, :, :width]
        first += stack.shape[0]
    return words.view(np.uint32)


def _places(view: BundleView, slots: Longs) -> tuple[slice | Longs, ...]:
    """Index of slots in a stack: sources, page, tile, slot of the tile; no last two in pages of one slot."""
    if view.page_size == 1:
        return slice(None), slots
    within = slots % view.page_size
    return slice(None), slots // view.page_size, within // view.tile_size, within % view.tile_size


def _take_rows(rows: NDArray[np.generic], slots: Longs, into: NDArray[np.generic]) -> None:
    """into = rows[:, slots], by the faster of NumPy's ways."""
    if rows.flags.c_contiguous and into.flags.c_contiguous:
        rows.take(slots, 1, into, "clip")  # in range already; "raise" would buffer
    else:
        into[:] = rows[:, slots]
