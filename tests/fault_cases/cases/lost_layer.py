"""Lost write in one layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """The last layer of one forward's last tokens is not stored."""

    def write(original: Callable[..., None], layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        kept = slots.numel()
        if stage.ripe and slots.numel() > 16 and layer == len(stage.pool.stores) - 1:
            kept -= 12
            stage.strike()
        original(layer, slots[:kept], key[:kept], value[:kept])

    stage.around(stage.pool, "write", write)


FAULT_CASE = FaultCase(
    title="lost write in one layer",
    place="attention kernel",
    story="the kernel of one layer leaves part of the new KV unwritten",
    reports=("https://github.com/sgl-project/sglang/pull/22868",),
    plant=plant,
    missed="each forward compares one layer with before; a layer that is never written is found",
    elsewhere="a comparison of outputs with a reference implementation",
)
