"""Integer overflow of slot addresses."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Slots above half of the pool wrap in one forward, as bytes beyond 2 GiB do in 31 bits."""
    half, forward = stage.pool.num_slots // 2, [0]

    def write(original: Callable[..., None], layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        if stage.ripe and int((slots >= half).sum()) > 8:
            forward[0] = stage.forward
            stage.strike()
        original(layer, slots % half if forward[0] == stage.forward else slots, key, value)

    stage.around(stage.pool, "write", write)


FAULT_CASE = FaultCase(
    title="integer overflow of slot addresses",
    place="attention kernel",
    story="slot times stride is computed in too few bits: high slots wrap around to low ones",
    reports=(
        "https://github.com/vllm-project/vllm/issues/1486",
        "https://github.com/vllm-project/vllm/issues/50427",
        "https://github.com/lightseekorg/tokenspeed/pull/501",
        "https://github.com/flashinfer-ai/flashinfer/pull/3136",
        "https://github.com/syv-ai/qwen38-27b-rtx3090/issues/86",
    ),
    plant=plant,
    finds=("tail kv_data", "tail lost_write"),
    elsewhere="an illegal address error, when the product leaves the pool",
)
