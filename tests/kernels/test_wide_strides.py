"""Pools whose heads lie more than 2^31 bytes apart: offsets within a slot need 64 bits."""

from __future__ import annotations

import mmap

import pytest
import torch

from canary_kernels.buffers import KVSource
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import hash_slots, plan_fingerprint
from canary_kernels.hashing import layer_key_int, word_key_int
from canary_kernels.layout import Part, RealData, signed
from tests.kernels.scenes import device_of

SLOTS, HEAD_BYTES, HEADS = 8, 16, 3


def sparse_memory(nbytes: int, device: str) -> torch.Tensor:
    """uint8 [nbytes]; on the CPU only pages that are touched take memory."""
    if device == "cpu":
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("element_bytes", [HEAD_BYTES, 4], ids=["whole heads", "scattered elements"])
@pytest.mark.parametrize("head_stride", [(1 << 31) - 64, (1 << 31) + 64, 3 << 30])
@pytest.mark.parametrize("backend", list(Backend))
def test_heads_far_apart_are_read_where_they_lie(backend, head_stride, element_bytes):
    device = device_of(backend)
    element_stride = HEAD_BYTES if element_bytes == HEAD_BYTES else 2 * element_bytes
    slot_stride = 2 * HEAD_BYTES
    memory = sparse_memory((HEADS - 1) * head_stride + SLOTS * slot_stride, device)
    source = KVSource(
        tensor=memory, part=Part.K, layer=5, head_start=0, num_heads=HEADS, head_bytes=HEAD_BYTES,
        page_size=1, page_stride=slot_stride, slot_stride=0, head_stride=head_stride,
        element_bytes=element_bytes, element_stride=element_stride,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    expected = []
    for slot in range(SLOTS):
        data = torch.randint(0, 256, (HEADS * HEAD_BYTES,), dtype=torch.uint8, generator=generator)
        for index, value in enumerate(data.tolist()):
            head, byte = divmod(index, HEAD_BYTES)
            within = byte // element_bytes * element_stride + byte % element_bytes
            memory[head * head_stride + slot * slot_stride + within] = value
        words = data.view(torch.int32).tolist()
        total = sum(word_key_int(number) * (word & 0xFFFFFFFF) for number, word in enumerate(words))
        expected.append(signed(layer_key_int(5) * total))
    plan = plan_fingerprint([source], RealData.ALL, device)
    assert hash_slots(backend, plan, torch.arange(SLOTS, device=device))[:, 0].tolist() == expected
