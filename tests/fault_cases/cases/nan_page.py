"""NaN page."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """The values of one slot in one layer."""

    def harm(slots: Tensor) -> None:
        stage.pool.stores[-1].tensors()[1][slots[5]] = torch.nan

    stage.damage(harm)


FAULT_CASE = FaultCase(
    title="NaN page",
    place="memory",
    story="padding rows leave NaN in a page that is in use",
    reports=(
        "https://github.com/huggingface/transformers/pull/46765",
        "https://github.com/sgl-project/sglang/pull/32477",
        "https://github.com/vllm-project/vllm/pull/53856",
    ),
    plant=plant,
    finds=("tail kv_data",),
    elsewhere="a NaN check on logits, where there is one",
)
