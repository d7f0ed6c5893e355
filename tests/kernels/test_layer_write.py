"""One layer's bytes before and after a forward: reference, compiled kernel and plain Python agree."""

from __future__ import annotations

import pytest
import torch

from canary_kernels.buffers import allocate_buffers
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import layer_plans, plan_fingerprint
from canary_kernels.layer_write import allocate_witness, check_layer, note_layer
from canary_kernels.layout import (
    COUNT_LAYER_CHECKED,
    COUNT_LAYER_LEFT_OUT,
    IDENTITY,
    NUM_LANES,
    ROW_PART,
    ROW_POSITION,
    ROW_SLOT,
    Phase,
    RealData,
    Reason,
    RecordState,
    identity_of,
    lane,
)
from tests.kernels import pools
from tests.kernels.scenes import device_of

LOST = lane(Phase.TAIL, Reason.LOST_WRITE)
COMPLETE, EMPTY, ADOPTED = RecordState.COMPLETE, RecordState.EMPTY, RecordState.ADOPTED


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("layout", [pools.separate, pools.unequal, pools.heads_first])
def test_each_layer_is_checked_by_itself(backend, layout):
    device = device_of(backend)
    pool = layout(device)
    plan = plan_fingerprint(pool.sources, RealData.ALL, device)
    plans = layer_plans(plan)
    places = sorted(pool.bytes)
    assert sum(len(part.bundles[0].sources) for part in plans) == len(places)
    for layer in plans:
        (bundle,) = layer.bundles
        numbers = {source.layer for source in bundle.sources}
        assert len(numbers) == 1
        for spared in bundle.sources:
            clock = torch.ones(1, dtype=torch.int64, device=device)
            buffers = allocate_buffers(pools.SLOTS, clock)
            witness = allocate_witness(torch.device(device))
            slots = torch.tensor([3, -1, 5, 7, 9, 1 << 40], device=device)
            before = {3: (7, COMPLETE), 5: (8, COMPLETE), 7: (7, ADOPTED), 9: (0, EMPTY)}
            for slot, (token, state) in before.items():
                buffers.records[slot, IDENTITY] = identity_of(token, 1, state)
            for place in places:  # slot 9 was never written
                pool.bytes[place][9][:] = 0
            note_layer(backend, buffers, layer, witness, slots)
            for slot in before:
                buffers.records[slot, IDENTITY] = identity_of(8, 2, COMPLETE)
                for part, number in places:
                    if (part, number) != (spared.part, spared.layer):
                        pool.bytes[part, number][slot][:] ^= 1
            check_layer(backend, buffers, layer, witness, slots)
            # 5 has the token it had; nobody knows what 7 held; 3 held another one; 9 held nothing.
            assert buffers.counters[:NUM_LANES].sum() == buffers.counters[LOST] == 2
            rows = buffers.violations[LOST, :2].tolist()
            assert sorted(row[ROW_SLOT] for row in rows) == [3, 9]
            assert {(row[ROW_PART], row[ROW_POSITION]) for row in rows} == {(int(spared.part), 2)}
            assert buffers.counters[COUNT_LAYER_CHECKED] == 4
            assert buffers.counters[COUNT_LAYER_LEFT_OUT] == 2
            # A note serves one check.
            check_layer(backend, buffers, layer, witness, slots)
            assert buffers.counters[LOST] == 2
            assert buffers.counters[COUNT_LAYER_LEFT_OUT] == 2 + 6


@pytest.mark.parametrize("backend", list(Backend))
def test_a_check_of_other_slots_than_noted_compares_nothing(backend):
    device = device_of(backend)
    pool = pools.separate(device)
    (layer, *_) = layer_plans(plan_fingerprint(pool.sources, RealData.ALL, device))
    buffers = allocate_buffers(pools.SLOTS, torch.ones(1, dtype=torch.int64, device=device))
    witness = allocate_witness(torch.device(device))
    buffers.records[:, IDENTITY] = identity_of(7, 1, COMPLETE)
    note_layer(backend, buffers, layer, witness, torch.tensor([3, 4], device=device))
    buffers.records[:, IDENTITY] = identity_of(8, 1, COMPLETE)
    check_layer(backend, buffers, layer, witness, torch.tensor([4, 3], device=device))
    assert buffers.counters[LOST] == 0
    assert buffers.counters[COUNT_LAYER_LEFT_OUT] == 2
