"""Fingerprint compiled for the CPU: slot after slot, layer after layer, run after run of words."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import torch

from canary_kernels import layout
from canary_kernels.frames import Frame, frame_of_buffers
from canary_kernels.layout import Part, Phase, RealData, Reason, RecordState, Unverified
from canary_kernels.native import (
    kernel,
    load_int64,
    load_uint8,
    load_uint32,
    piece,
    store_int64,
)
from canary_kernels.native_records import count, integer_at, position_of, record_at, report, state_of

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers
    from canary_kernels.fingerprint.plan import FingerprintPlan

_PENDING, _COMPLETE = int(RecordState.PENDING), int(RecordState.COMPLETE)
_ADOPTED, _PATROL = int(RecordState.ADOPTED), int(Phase.PATROL)
_LOST_WRITE = layout.lane(Phase.TAIL, Reason.LOST_WRITE)
_KV_DATA, _NUM_REASONS = int(Reason.KV_DATA), layout.NUM_REASONS
_PART_K, _PART_V, _NO_REQUEST = int(Part.K), int(Part.V), layout.NO_REQUEST
_COUNT_RUNS, _COUNT_HASHED = layout.COUNT_RUNS, layout.COUNT_HASHED
_COUNT_COMPLETED, _COUNT_COMPLETE_RUNS = layout.COUNT_COMPLETED, layout.COUNT_COMPLETE_RUNS
_COUNT_UNVERIFIED, _NUM_UNVERIFIED = layout.COUNT_UNVERIFIED, layout.NUM_UNVERIFIED
_SKIPPED_ADOPTED, _SKIPPED_PENDING = int(Unverified.ADOPTED), int(Unverified.PENDING)
_SKIPPED_UNCOVERED = int(Unverified.NO_FINGERPRINT)
_IDENTITY, _FINGERPRINT_K, _FINGERPRINT_V = layout.IDENTITY, layout.FINGERPRINT_K, layout.FINGERPRINT_V
_PENDING_TO_COMPLETE = (_COMPLETE - _PENDING) << 32

# Words of a plan's frame: the head, then _BUNDLE_WORDS for each bundle.
_COVERED, _NUM_BUNDLES, _PLAN_SLOTS, _HEAD_WORDS = range(4)
(
    _TABLE, _WORD_KEYS, _NUM_SOURCES, _NUM_K, _PAGE_SIZE, _PAGE_STRIDE, _TILE_SIZE, _TILE_STRIDE,
    _SLOT_STRIDE, _HEAD_BYTES, _HEAD_STRIDE, _BAND_BYTES, _BAND_STRIDE, _ELEMENT_BYTES, _ELEMENT_STRIDE,
    _NUM_BYTES, _ALIGNMENT, _BUNDLE_WORDS,
) = range(18)  # fmt: skip
_WORD_BYTES = 4


@piece
def _sum_words(address, keys, length):
    """uint64: words that follow one another, each times its key; keys = address of the first one's."""
    total = np.uint64(0)
    for word in range(length):
        total += load_uint32(address, word) * np.uint64(load_int64(keys, word))
    return total


@piece
def _sum_run_bytes(address, keys, first, length):
    """uint64: bytes that follow one another, each as its place in its word times the word's key."""
    total = np.uint64(0)
    for byte in range(length):
        number = first + byte
        value = load_uint8(address, byte) << np.uint64(8 * (number % _WORD_BYTES))
        total += value * np.uint64(load_int64(keys, number // _WORD_BYTES))
    return total


@piece
def _sum_source(address, bundle, keys, whole):
    """uint64: a slot in one source; whole = its runs are aligned words.

    Without, it goes byte by byte; what is missing of the last word counts as zeros.
    """
    head_bytes, head_stride = load_int64(bundle, _HEAD_BYTES), load_int64(bundle, _HEAD_STRIDE)
    band_bytes, band_stride = load_int64(bundle, _BAND_BYTES), load_int64(bundle, _BAND_STRIDE)
    element_bytes, element_stride = load_int64(bundle, _ELEMENT_BYTES), load_int64(bundle, _ELEMENT_STRIDE)
    covered = load_int64(bundle, _NUM_BYTES)
    total, number = np.uint64(0), 0
    while number < covered:
        head_end, band_at = min(number + head_bytes, covered), address
        while number < head_end:
            band_end, run = min(number + band_bytes, head_end), band_at
            while number < band_end:
                length = min(element_bytes, band_end - number)
                if whole:
                    total += _sum_words(run, keys + 2 * number, length // _WORD_BYTES)
                else:
                    total += _sum_run_bytes(run, keys, number, length)
                number += length
                run += element_stride
            band_at += band_stride
        address += head_stride
    return total


@piece
def _hash_slot(plan, slot):
    """uint64 pair: fingerprints of K and V as the bytes are now."""
    hash_k = hash_v = np.uint64(0)
    for number in range(load_int64(plan, _NUM_BUNDLES)):
        bundle = plan + 8 * (_HEAD_WORDS + number * _BUNDLE_WORDS)
        page_size, page_stride = load_int64(bundle, _PAGE_SIZE), load_int64(bundle, _PAGE_STRIDE)
        page = slot // page_size
        in_page, tile_size = slot - page * page_size, load_int64(bundle, _TILE_SIZE)
        tile = in_page // tile_size
        start = page * page_stride + tile * load_int64(bundle, _TILE_STRIDE)
        start += (in_page - tile * tile_size) * load_int64(bundle, _SLOT_STRIDE)
        table, keys = load_int64(bundle, _TABLE), load_int64(bundle, _WORD_KEYS)
        sources, num_k = load_int64(bundle, _NUM_SOURCES), load_int64(bundle, _NUM_K)
        whole = load_int64(bundle, _ALIGNMENT) % _WORD_BYTES == 0
        for source in range(sources):
            address = load_int64(table, source) + start
            total = _sum_source(address, bundle, keys, whole)
            total *= np.uint64(load_int64(table, sources + source))
            if source < num_k:
                hash_k += total
            else:
                hash_v += total
    return hash_k, hash_v


@kernel("void(int64, int64, int64, int64, int64)")
def _hash_slots(plan, slots, size, length, hashes):
    for index in range(length):
        slot = integer_at(slots, size, index)
        if 0 <= slot < load_int64(plan, _PLAN_SLOTS):
            hash_k, hash_v = _hash_slot(plan, slot)
            store_int64(hashes, 2 * index, np.int64(hash_k))
            store_int64(hashes, 2 * index + 1, np.int64(hash_v))


@piece
def _stage(buffers, plan, slot, record, staged):
    """Hash one PENDING record's slot, report a lost write, stage (int64 [4]) what is to be stored."""
    identity = load_int64(record, _IDENTITY)
    hashes = _hash_slot(plan, slot)
    hash_k, hash_v = np.int64(hashes[0]), np.int64(hashes[1])
    old_k, old_v = load_int64(record, _FINGERPRINT_K), load_int64(record, _FINGERPRINT_V)
    if (old_k or old_v) and old_k == hash_k and old_v == hash_v and load_int64(plan, _COVERED):
        place = (slot, position_of(identity), _NO_REQUEST)
        report(buffers, _LOST_WRITE, place, _PART_K, old_k, hash_k)
    staged[0], staged[1], staged[2], staged[3] = record, identity + _PENDING_TO_COMPLETE, hash_k, hash_v


@kernel("void(int64, int64, int64, int64, int64)")
def _complete_slots(buffers, plan, slots, size, length):
    # All is read before anything is stored: a slot listed twice is PENDING both times.
    staged = np.empty((length, 4), dtype=np.int64)
    completed = 0
    for index in range(length):
        slot = integer_at(slots, size, index)
        record = record_at(buffers, slot)
        if record and state_of(load_int64(record, _IDENTITY)) == _PENDING:
            _stage(buffers, plan, slot, record, staged[completed])
            completed += 1
    for number in range(completed):
        record = staged[number, 0]
        store_int64(record, _IDENTITY, staged[number, 1])
        store_int64(record, _FINGERPRINT_K, staged[number, 2])
        store_int64(record, _FINGERPRINT_V, staged[number, 3])
    count(buffers, _COUNT_COMPLETED, completed)
    count(buffers, _COUNT_COMPLETE_RUNS, 1)


@piece
def _report_data(buffers, phase, slots, size, hashes):
    """Log every difference of K, then every one of V; hashes: int64 [n, 2], of COMPLETE records."""
    for part in range(2):
        for index in range(hashes.shape[0]):
            slot = integer_at(slots, size, index)
            record = record_at(buffers, slot)
            if record and state_of(load_int64(record, _IDENTITY)) == _COMPLETE:
                stored = load_int64(record, _FINGERPRINT_K + part)
                if stored != hashes[index, part]:
                    place = (slot, position_of(load_int64(record, _IDENTITY)), _NO_REQUEST)
                    lane = phase * _NUM_REASONS + _KV_DATA
                    report(buffers, lane, place, _PART_K + part, stored, hashes[index, part])


@kernel("void(int64, int64, int64, int64, int64, int64)")
def _compare_slots(buffers, plan, slots, size, length, phase):
    covered = load_int64(plan, _COVERED) != 0
    hashes = np.empty((length, 2), dtype=np.int64)
    complete = adopted = pending = differ = 0
    for index in range(length):
        slot = integer_at(slots, size, index)
        record = record_at(buffers, slot)
        state = state_of(load_int64(record, _IDENTITY)) if record else 0
        if state == _COMPLETE:
            complete += 1
            if covered:
                hash_k, hash_v = _hash_slot(plan, slot)
                hashes[index, 0], hashes[index, 1] = np.int64(hash_k), np.int64(hash_v)
                differ += hashes[index, 0] != load_int64(record, _FINGERPRINT_K)
                differ += hashes[index, 1] != load_int64(record, _FINGERPRINT_V)
        adopted += state == _ADOPTED
        pending += state == _PENDING
    causes = _COUNT_UNVERIFIED + phase * _NUM_UNVERIFIED
    if phase == _PATROL:
        count(buffers, causes + _SKIPPED_ADOPTED, adopted)
        count(buffers, causes + _SKIPPED_PENDING, pending)
        count(buffers, _COUNT_RUNS + phase, 1)
    count(buffers, _COUNT_HASHED + phase if covered else causes + _SKIPPED_UNCOVERED, complete)
    if differ:
        _report_data(buffers, phase, slots, size, hashes)


def complete_slots(buffers: GroupBuffers, plan: FingerprintPlan, slots: Tensor) -> None:
    """Fingerprint PENDING records and make them COMPLETE."""
    slots = slots.contiguous()
    size, length = slots.itemsize, slots.numel()
    frame = _frame_in(buffers, plan)
    _complete_slots(frame_of_buffers(buffers), frame, slots.data_ptr(), size, length)


def compare_slots(buffers: GroupBuffers, plan: FingerprintPlan, slots: Tensor, phase: Phase) -> None:
    """Compare COMPLETE records with the bytes of their slots."""
    slots = slots.contiguous()
    size, length = slots.itemsize, slots.numel()
    frame = _frame_in(buffers, plan)
    _compare_slots(frame_of_buffers(buffers), frame, slots.data_ptr(), size, length, int(phase))


def hash_slots(plan: FingerprintPlan, slots: Tensor) -> Tensor:
    """int64 [n, 2]: fingerprints of K and V as the bytes are now; 0 for slots outside the plan's memory."""
    slots = slots.contiguous()
    hashes = torch.zeros((slots.shape[0], 2), dtype=torch.int64)
    frame = _frame_of_plan(plan)
    size, length = slots.itemsize, slots.numel()
    _hash_slots(frame.address, slots.data_ptr(), size, length, hashes.data_ptr())
    return hashes


def _frame_in(buffers: GroupBuffers, plan: FingerprintPlan) -> int:
    """Address of a plan's frame; made once for the buffers it is used with."""
    known: tuple[FingerprintPlan, Frame] | None = buffers.cache.get(_frame_in)
    if known is None or known[0] is not plan:
        known = buffers.cache[_frame_in] = plan, _frame_of_plan(plan)
    return known[1].address


def _frame_of_plan(plan: FingerprintPlan) -> Frame:
    covered = plan.coverage is not RealData.NONE
    words = array("q", (covered, len(plan.bundles), plan.num_slots or 0))
    for bundle in plan.bundles:
        where = bundle.geometry
        words.extend((
            bundle.table.data_ptr(), bundle.word_keys.data_ptr(), len(bundle.sources), bundle.num_k,
            where.page_size, where.page_stride, where.tile_size, where.tile_stride, where.slot_stride,
            where.head_bytes, where.head_stride, where.band_bytes, where.band_stride, where.element_bytes,
            where.element_stride, where.num_bytes, bundle.alignment,
        ))  # fmt: skip
    tables = [table for bundle in plan.bundles for table in (bundle.table, bundle.word_keys)]
    tensors = [source.tensor for bundle in plan.bundles for source in bundle.sources]
    return Frame(words.buffer_info()[0], words, (*tables, *tensors))
