"""Layer-incomplete copy."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.mover import copying
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every copy leaves out the last layer."""

    def copy(original: Callable[..., None], source: Tensor, target: Tensor) -> None:
        for store in stage.pool.stores[:-1]:
            for tensor in store.tensors():
                tensor[target] = tensor[source]

    stage.spoil(stage.mover, "copy", copy)


FAULT_CASE = FaultCase(
    title="layer-incomplete copy",
    place="copy",
    story="a copy ends before its last layer",
    reports=(
        "https://github.com/LMCache/LMCache/pull/4816",
        "https://github.com/vllm-project/vllm/issues/52234",
    ),
    plant=plant,
    finds=("hit kv_data",),
    furnish=copying,
)
