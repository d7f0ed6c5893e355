"""Layers in the wrong order."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.mover import copying
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every copy shifts all layers by one."""

    def copy(original: Callable[..., None], source: Tensor, target: Tensor) -> None:
        stores = stage.pool.stores
        for here, there in zip(stores, (*stores[1:], stores[0]), strict=True):
            for old, new in zip(here.tensors(), there.tensors(), strict=True):
                new[target] = old[source]

    stage.spoil(stage.mover, "copy", copy)


FAULT_CASE = FaultCase(
    title="layers in the wrong order",
    place="copy",
    story="a copy puts a layer's KV into the next layer",
    reports=("https://github.com/vllm-project/vllm/pull/57662",),
    plant=plant,
    finds=("hit kv_data",),
    furnish=copying,
)
