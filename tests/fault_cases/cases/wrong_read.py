"""Kernel reads the wrong rows."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every read of the last layer is one slot off."""

    def read(original: Callable[..., object], layer: int, slots: Tensor) -> object:
        if stage.warm and layer == len(stage.pool.stores) - 1:
            stage.strike()
            slots = (slots + 1) % stage.pool.num_slots
        return original(layer, slots)

    stage.around(stage.pool, "read", read)


FAULT_CASE = FaultCase(
    title="kernel reads the wrong rows",
    place="attention kernel",
    story="table and cache are right, but the kernel computes another address when it reads",
    reports=(
        "https://github.com/tanishqkumar/ssd/issues/23",
        "https://github.com/vllm-project/vllm/issues/52109",
        "https://github.com/tenstorrent/vllm/issues/415",
    ),
    plant=plant,
    missed="what is stored is intact; the canary checks memory and tables, not the kernel's own arithmetic",
    elsewhere="a comparison of outputs with a reference implementation",
)
