"""Copy racing a forward."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.mover import copying
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every copy's bytes arrive after the last layer has read."""

    def copy(original: Callable[..., None], source: Tensor, target: Tensor) -> None:
        late = stage.mover.store(source)

        def sample(sampled: Callable[..., object], *given: object) -> object:
            if late:
                stage.mover.load(late, target)
                late.clear()
            return sampled(*given)

        stage.around(stage.runner, "sample", sample)

    stage.spoil(stage.mover, "copy", copy)


FAULT_CASE = FaultCase(
    title="copy racing a forward",
    place="copy",
    story="the forward reads pages whose copy is still under way",
    reports=(
        "https://github.com/vllm-project/vllm/issues/45704",
        "https://github.com/sgl-project/sglang/pull/36738",
        "https://github.com/local-inference-lab/rtx6kpro/issues/47",
    ),
    plant=plant,
    finds=("hit kv_data",),
    furnish=copying,
)
