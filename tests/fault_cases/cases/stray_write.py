"""Stray write."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Two hundred bytes of someone else's data, at an address that belongs to slots in use."""

    def harm(slots: Tensor) -> None:
        first = stage.pool.stores[1].tensors()[0][slots[0]].view(torch.uint8).flatten()
        words = first.untyped_storage()
        start = first.storage_offset()
        noise = torch.from_numpy(stage.random.integers(0, 120, 200, dtype="uint8"))
        torch.tensor([], dtype=torch.uint8).set_(words)[start : start + 200] = noise

    stage.damage(harm)


FAULT_CASE = FaultCase(
    title="stray write",
    place="another kernel",
    story="a kernel writes past its own buffer into the pool",
    reports=(
        "https://github.com/vllm-project/vllm/issues/53982",
        "https://github.com/local-inference-lab/b12x/pull/40",
    ),
    plant=plant,
    finds=("hit kv_data", "tail kv_data"),
)
