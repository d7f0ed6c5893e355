"""K and V swapped in a copy."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.mover import copying
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every copy exchanges keys and values."""

    def copy(original: Callable[..., None], source: Tensor, target: Tensor) -> None:
        for store in stage.pool.stores:
            key, value = store.tensors()
            key[target], value[target] = value[source], key[source]

    stage.spoil(stage.mover, "copy", copy)


FAULT_CASE = FaultCase(
    title="K and V swapped in a copy",
    place="copy",
    story="a copy takes the two halves of a layer in the wrong order",
    reports=(
        "https://github.com/LMCache/LMCache/issues/683",
        "https://github.com/LMCache/LMCache/pull/4220",
    ),
    plant=plant,
    finds=("hit kv_data",),
    furnish=copying,
)
