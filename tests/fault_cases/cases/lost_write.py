"""Lost write."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """No layer of one forward's last tokens is stored."""
    forward = [0]

    def write(original: Callable[..., None], layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        if stage.ripe and slots.numel() > 16:
            forward[0] = stage.forward
            stage.strike()
        kept = slots.numel() - 12 if forward[0] == stage.forward else slots.numel()
        original(layer, slots[:kept], key[:kept], value[:kept])

    stage.around(stage.pool, "write", write)


FAULT_CASE = FaultCase(
    title="lost write",
    place="attention kernel",
    story="the kernel that stores KV skips the new tokens of a request",
    reports=("https://github.com/1bit-MONSTER/1bit-MONSTER/issues/686",),
    plant=plant,
    finds=("tail lost_write",),
)
