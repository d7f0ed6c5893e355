"""Bit flip."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """The highest exponent bit of one word of one key."""

    def harm(slots: Tensor) -> None:
        key = stage.pool.stores[0].tensors()[0][slots[3]].view(torch.int32)
        key[0, 2] ^= 1 << 30

    stage.damage(harm)


FAULT_CASE = FaultCase(
    title="bit flip",
    place="memory",
    story="one bit of a key changes in device memory",
    reports=(
        "https://github.com/tenstorrent/tt-metal/pull/20940",
        "https://github.com/wtdcode/vllm-backport/issues/62",
    ),
    plant=plant,
    finds=("tail kv_data",),
    elsewhere="ECC, when it is a memory cell and not a bus or a controller",
)
