"""A pool of more than 4 GiB per layer whose heads lie more than 2^31 bytes apart, on a GPU."""

from __future__ import annotations

import pytest
import torch

from canary_kernels.buffers import allocate_buffers, source_from_tensor
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import compare_range, complete_slots, hash_slots, plan_fingerprint
from canary_kernels.layout import (
    COUNT_HASHED,
    NUM_LANES,
    Part,
    Phase,
    RealData,
    Reason,
    RecordState,
    identity_of,
    lane,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HEADS, SLOTS, DIM = 2, 9 << 20, 128  # bfloat16: a head's slots take 2.25 GiB, a layer 4.5 GiB
FAR = [0, 1, SLOTS // 2, SLOTS - 2, SLOTS - 1]


@pytest.fixture(scope="module")
def pool():
    """K and V of one layer, head-major: [slots, heads, dim] of [heads, slots, dim]."""
    free, _ = torch.cuda.mem_get_info()
    if free < 14 << 30:
        pytest.skip(f"{free >> 30} GiB of GPU memory are free, 14 are needed")
    generator = torch.Generator("cuda").manual_seed(5)
    made = []
    for _ in range(2):
        memory = torch.empty((HEADS, SLOTS, DIM), dtype=torch.bfloat16, device="cuda")
        memory.view(torch.int32).random_(generator=generator)
        assert memory.nbytes > 4 << 30
        assert memory.stride(0) * memory.element_size() > 1 << 31
        made.append(memory.transpose(0, 1))
    return made


def plan_of(tensors, device: str):
    parts = zip(tensors, (Part.K, Part.V), strict=True)
    return plan_fingerprint([source_from_tensor(t, part, 3) for t, part in parts], RealData.ALL, device)


def reference_of(pool, slots: list[int]) -> list[list[int]]:
    """The same slots in a small pool on the CPU."""
    small = [tensor[slots].cpu() for tensor in pool]
    sources = [
        source_from_tensor(tensor, part, 3) for tensor, part in zip(small, (Part.K, Part.V), strict=True)
    ]
    plan = plan_fingerprint(sources, RealData.ALL, "cpu")
    return hash_slots(Backend.TORCH, plan, torch.arange(len(slots))).tolist()


def test_far_slots_hash_to_the_reference(pool) -> None:
    sources = [
        source_from_tensor(tensor, part, 3) for tensor, part in zip(pool, (Part.K, Part.V), strict=True)
    ]
    plan = plan_fingerprint(sources, RealData.ALL, "cuda")
    found = hash_slots(Backend.TRITON, plan, torch.tensor(FAR, device="cuda"))
    assert found.tolist() == reference_of(pool, FAR)


def test_far_slots_are_completed_and_compared(pool) -> None:
    sources = [
        source_from_tensor(tensor, part, 3) for tensor, part in zip(pool, (Part.K, Part.V), strict=True)
    ]
    plan = plan_fingerprint(sources, RealData.ALL, "cuda")
    buffers = allocate_buffers(SLOTS, torch.ones(1, dtype=torch.int64, device="cuda"))
    slots = torch.tensor(FAR, device="cuda")
    buffers.records[slots, 0] = identity_of(7, 0, RecordState.PENDING)
    complete_slots(Backend.TRITON, buffers, plan, slots)
    assert buffers.records[slots, 2:].tolist() == reference_of(pool, FAR)
    compare_range(Backend.TRITON, buffers, plan, range(SLOTS - 4, SLOTS), Phase.SWEEP)
    assert buffers.counters[COUNT_HASHED + Phase.SWEEP] == 2
    assert buffers.counters[:NUM_LANES].sum() == 0
    word = pool[0][SLOTS - 1, HEADS - 1].view(torch.int16)
    word[DIM - 1] ^= 1
    compare_range(Backend.TRITON, buffers, plan, range(SLOTS - 4, SLOTS), Phase.SWEEP)
    word[DIM - 1] ^= 1
    assert buffers.counters[lane(Phase.SWEEP, Reason.KV_DATA)] == 1
