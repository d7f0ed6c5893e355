"""Copy to the wrong slot."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.mover import copying
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every copy lands one slot further."""

    def copy(original: Callable[..., None], source: Tensor, target: Tensor) -> None:
        original(source, (target + 1) % stage.pool.num_slots)

    stage.spoil(stage.mover, "copy", copy)


FAULT_CASE = FaultCase(
    title="copy to the wrong slot",
    place="copy",
    story="a copy's destination is one page off",
    reports=(
        "https://github.com/sgl-project/sglang/issues/38319",
        "https://github.com/vllm-project/vllm/issues/52234",
    ),
    plant=plant,
    finds=("hit kv_data", "tail kv_data"),
    furnish=copying,
)
