"""Padding row writes a real slot."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every layer of one forward writes its first row to the last slot as well, while that is in use."""
    last, forward = stage.pool.num_slots - 1, [0]

    def write(original: Callable[..., None], layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        original(layer, slots, key, value)
        if stage.ripe and any(last in r.slots[: r.computed] for r in stage.veterans(shortest=8)):
            forward[0] = stage.forward
            stage.strike()
        if forward[0] == stage.forward:
            original(layer, torch.tensor([last]), key[:1], value[:1])

    stage.around(stage.pool, "write", write)


FAULT_CASE = FaultCase(
    title="padding row writes a real slot",
    place="attention kernel",
    story="slot -1 of a padding row is taken as an index: the last slot of the pool is overwritten",
    reports=(
        "https://github.com/vllm-project/vllm/issues/43810",
        "https://github.com/vllm-project/vllm/pull/13922",
        "https://github.com/m0at/rvllm/pull/32",
    ),
    plant=plant,
    finds=("tail kv_data",),
)
