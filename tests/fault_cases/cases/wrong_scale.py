"""Quantised scale mismatch."""

from __future__ import annotations

from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """The key scales of slots in use take the values of other slots."""

    def harm(slots: Tensor) -> None:
        for store in stage.pool.stores:
            store.scales[0, slots[:8]] = store.scales[0, slots[8:16]] * 4

    stage.damage(harm)


FAULT_CASE = FaultCase(
    title="quantised scale mismatch",
    place="attention kernel",
    story="the scales of a slot are not those its elements were quantised with",
    reports=(
        "https://github.com/ROCm/ATOM/pull/793",
        "https://github.com/flashinfer-ai/flashinfer/issues/4979",
        "https://github.com/vllm-project/vllm/issues/50702",
    ),
    plant=plant,
    finds=("hit kv_data", "tail kv_data"),
    engine={"model": "fp8"},
)
