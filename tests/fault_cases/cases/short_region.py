"""Wrong region length."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.mover import copying
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every copy moves half of its slots."""

    def copy(original: Callable[..., None], source: Tensor, target: Tensor) -> None:
        half = source.numel() // 2
        original(source[:half], target[:half])

    stage.spoil(stage.mover, "copy", copy)


FAULT_CASE = FaultCase(
    title="wrong region length",
    place="copy",
    story="a copy uses another region's length and stops half way",
    reports=("https://github.com/vllm-project/vllm/pull/57662",),
    plant=plant,
    finds=("hit kv_data",),
    furnish=copying,
)
