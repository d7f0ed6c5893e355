"""Fingerprint compiled for the CPU: slot after slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from canary_kernels import layout
from canary_kernels.fingerprint.cpu_hash import (
    COVERED,
    PLAN_SLOTS,
    frame_in,
    frame_of_plan,
    hash_slot,
)
from canary_kernels.frames import frame_of_buffers
from canary_kernels.layout import Part, Phase, Reason, RecordState, Unverified
from canary_kernels.native import (
    kernel,
    load_int64,
    piece,
    store_int64,
)
from canary_kernels.native_records import (
    count,
    flaw_at,
    integer_at,
    position_of,
    record_at,
    report,
    state_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers
    from canary_kernels.fingerprint.plan import FingerprintPlan

_PENDING, _COMPLETE = int(RecordState.PENDING), int(RecordState.COMPLETE)
_ADOPTED, _AWAITED = int(RecordState.ADOPTED), int(RecordState.AWAITED)
_BASELINE, _DAMAGED = int(RecordState.BASELINE), -1
_HEAD, _PATROL, _HIT = int(Phase.HEAD), int(Phase.PATROL), int(Phase.HIT)
_LOST_WRITE = layout.lane(Phase.TAIL, Reason.LOST_WRITE)
_KV_DATA, _NUM_REASONS = int(Reason.KV_DATA), layout.NUM_REASONS
_RECORD = int(Reason.RECORD)
_PART_K, _PART_V, _NO_REQUEST = int(Part.K), int(Part.V), layout.NO_REQUEST
_COUNT_RUNS, _COUNT_HASHED = layout.COUNT_RUNS, layout.COUNT_HASHED
_COUNT_COMPLETED, _COUNT_COMPLETE_RUNS = layout.COUNT_COMPLETED, layout.COUNT_COMPLETE_RUNS
_COUNT_UNHASHED, _COUNT_UNCOMPLETED = layout.COUNT_UNHASHED, layout.COUNT_UNCOMPLETED
_COUNT_UNVERIFIED, _NUM_UNVERIFIED = layout.COUNT_UNVERIFIED, layout.NUM_UNVERIFIED
_SKIPPED_ADOPTED, _SKIPPED_PENDING = int(Unverified.ADOPTED), int(Unverified.PENDING)
_SKIPPED_UNCOVERED = int(Unverified.NO_FINGERPRINT)
_IDENTITY, _FINGERPRINT_K, _FINGERPRINT_V = layout.IDENTITY, layout.FINGERPRINT_K, layout.FINGERPRINT_V
_PENDING_TO_COMPLETE, _ADOPTED_TO_BASELINE = layout.PENDING_TO_COMPLETE, layout.ADOPTED_TO_BASELINE
_COUNT_CENSUS = layout.COUNT_CENSUS
_COUNT_BASELINES, _COUNT_BASELINE_RUNS = layout.COUNT_BASELINES, layout.COUNT_BASELINE_RUNS


@kernel("void(int64, int64, int64, int64, int64)")
def _hash_slots(plan, slots, size, length, hashes):
    for index in range(length):
        slot = integer_at(slots, size, index)
        if 0 <= slot < load_int64(plan, PLAN_SLOTS):
            hash_k, hash_v = hash_slot(plan, slot)
            store_int64(hashes, 2 * index, np.int64(hash_k))
            store_int64(hashes, 2 * index + 1, np.int64(hash_v))


@piece
def _stage(buffers, plan, slot, record, staged):
    """Hash one PENDING record's slot, report a lost write, stage (int64 [4]) what is to be stored."""
    identity = load_int64(record, _IDENTITY)
    hashes = hash_slot(plan, slot)
    hash_k, hash_v = np.int64(hashes[0]), np.int64(hashes[1])
    old_k, old_v = load_int64(record, _FINGERPRINT_K), load_int64(record, _FINGERPRINT_V)
    if (old_k or old_v) and old_k == hash_k and old_v == hash_v and load_int64(plan, COVERED):
        place = (slot, position_of(identity), _NO_REQUEST)
        report(buffers, _LOST_WRITE, place, _PART_K, old_k, hash_k)
    staged[0], staged[1], staged[2], staged[3] = record, identity ^ _PENDING_TO_COMPLETE, hash_k, hash_v


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
    count(buffers, _COUNT_UNCOMPLETED, length - completed)
    count(buffers, _COUNT_COMPLETE_RUNS, 1)


@piece
def _sound_state(record):
    """int64: a record's state; _DAMAGED where its check of itself does not hold, EMPTY for address 0."""
    if not record:
        return np.int64(0)
    return np.int64(_DAMAGED) if flaw_at(record) else state_of(load_int64(record, _IDENTITY))


@kernel("void(int64, int64, int64, int64, int64)")
def _baseline_slots(buffers, plan, slots, size, length):
    completed = 0
    covered = load_int64(plan, COVERED) != 0
    for index in range(length):
        slot = integer_at(slots, size, index)
        record = record_at(buffers, slot)
        state = _sound_state(record)
        if state >= _ADOPTED:
            after = _BASELINE if state == _ADOPTED and covered else state
            count(buffers, _COUNT_CENSUS + after, 1)
            if state == _ADOPTED and covered:
                hash_k, hash_v = hash_slot(plan, slot)
                store_int64(record, _FINGERPRINT_K, np.int64(hash_k))
                store_int64(record, _FINGERPRINT_V, np.int64(hash_v))
                store_int64(record, _IDENTITY, load_int64(record, _IDENTITY) ^ _ADOPTED_TO_BASELINE)
                completed += 1
    count(buffers, _COUNT_BASELINES, completed)
    count(buffers, _COUNT_BASELINE_RUNS, 1)


@piece
def _report_records(buffers, phase, slots, size, length):
    """Log every record whose check of itself does not hold."""
    for index in range(length):
        slot = integer_at(slots, size, index)
        record = record_at(buffers, slot)
        if record and flaw_at(record):
            place = (slot, position_of(load_int64(record, _IDENTITY)), _NO_REQUEST)
            report(buffers, phase * _NUM_REASONS + _RECORD, place, 0, 0, flaw_at(record))


@piece
def _report_data(buffers, phase, slots, size, hashes):
    """Log every difference of K, then every one of V; hashes: int64 [n, 2], of compared records."""
    for part in range(2):
        for index in range(hashes.shape[0]):
            slot = integer_at(slots, size, index)
            record = record_at(buffers, slot)
            state = _sound_state(record)
            if state in (_COMPLETE, _BASELINE):
                stored = load_int64(record, _FINGERPRINT_K + part)
                if stored != hashes[index, part]:
                    place = (slot, position_of(load_int64(record, _IDENTITY)), _NO_REQUEST)
                    lane = phase * _NUM_REASONS + _KV_DATA
                    report(buffers, lane, place, _PART_K + part, stored, hashes[index, part])


@kernel("void(int64, int64, int64, int64, int64, int64)")
def _compare_slots(buffers, plan, slots, size, length, phase):
    covered = load_int64(plan, COVERED) != 0
    hashes = np.empty((length, 2), dtype=np.int64)
    complete = adopted = pending = damaged = differ = 0
    for index in range(length):
        slot = integer_at(slots, size, index)
        record = record_at(buffers, slot)
        state = _sound_state(record)
        if state in (_COMPLETE, _BASELINE):
            complete += 1
            if covered:
                hash_k, hash_v = hash_slot(plan, slot)
                hashes[index, 0], hashes[index, 1] = np.int64(hash_k), np.int64(hash_v)
                differ += hashes[index, 0] != load_int64(record, _FINGERPRINT_K)
                differ += hashes[index, 1] != load_int64(record, _FINGERPRINT_V)
        adopted += state in (_ADOPTED, _AWAITED)
        pending += state == _PENDING
        damaged += state == _DAMAGED
    causes = _COUNT_UNVERIFIED + phase * _NUM_UNVERIFIED
    if phase == _PATROL:
        count(buffers, causes + _SKIPPED_ADOPTED, adopted)
        count(buffers, causes + _SKIPPED_PENDING, pending)
    if phase in (_PATROL, _HIT):
        count(buffers, _COUNT_RUNS + phase, 1)
    count(buffers, _COUNT_HASHED + phase if covered else causes + _SKIPPED_UNCOVERED, complete)
    count(buffers, _COUNT_UNHASHED + phase, length - complete if covered else length)
    if damaged and phase in (_HEAD, _PATROL, _HIT):
        _report_records(buffers, phase, slots, size, length)
    if differ:
        _report_data(buffers, phase, slots, size, hashes)


def complete_slots(buffers: GroupBuffers, plan: FingerprintPlan, slots: Tensor) -> None:
    """Fingerprint PENDING records and make them COMPLETE."""
    slots = slots.contiguous()
    size, length = slots.itemsize, slots.numel()
    frame = frame_in(buffers, plan)
    _complete_slots(frame_of_buffers(buffers), frame, slots.data_ptr(), size, length)


def baseline_slots(buffers: GroupBuffers, plan: FingerprintPlan, slots: Tensor) -> None:
    """Fingerprint ADOPTED records and make them BASELINE."""
    slots = slots.contiguous()
    size, length = slots.itemsize, slots.numel()
    frame = frame_in(buffers, plan)
    _baseline_slots(frame_of_buffers(buffers), frame, slots.data_ptr(), size, length)


def compare_slots(buffers: GroupBuffers, plan: FingerprintPlan, slots: Tensor, phase: Phase) -> None:
    """Compare COMPLETE and BASELINE records with the bytes of their slots."""
    slots = slots.contiguous()
    size, length = slots.itemsize, slots.numel()
    frame = frame_in(buffers, plan)
    _compare_slots(frame_of_buffers(buffers), frame, slots.data_ptr(), size, length, int(phase))


def hash_slots(plan: FingerprintPlan, slots: Tensor) -> Tensor:
    """int64 [n, 2]: fingerprints of K and V as the bytes are now; 0 for slots outside the plan's memory."""
    slots = slots.contiguous()
    hashes = torch.zeros((slots.shape[0], 2), dtype=torch.int64)
    frame = frame_of_plan(plan)
    size, length = slots.itemsize, slots.numel()
    _hash_slots(frame.address, slots.data_ptr(), size, length, hashes.data_ptr())
    return hashes
