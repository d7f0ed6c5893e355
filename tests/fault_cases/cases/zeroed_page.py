"""Zeroed page."""

from __future__ import annotations

from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """All layers of eight slots."""

    def harm(slots: Tensor) -> None:
        for store in stage.pool.stores:
            for tensor in store.tensors():
                tensor[slots[:8]] = 0

    stage.damage(harm)


FAULT_CASE = FaultCase(
    title="zeroed page",
    place="another kernel",
    story="the kernel that clears fresh pages clears one in use",
    reports=(
        "https://github.com/vllm-project/vllm/issues/37076",
        "https://github.com/vllm-project/vllm/pull/43990",
        "https://github.com/1CatAI/1Cat-vLLM/pull/406",
    ),
    plant=plant,
    finds=("hit kv_data", "tail kv_data"),
)
