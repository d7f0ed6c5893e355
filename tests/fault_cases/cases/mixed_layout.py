"""Heads and tokens mixed up."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.mover import copying
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every copy reads heads-first what was stored tokens-first."""

    def copy(original: Callable[..., None], source: Tensor, target: Tensor) -> None:
        for store in stage.pool.stores:
            for tensor in store.tensors():
                rows = tensor[source]
                tensor[target] = rows.transpose(0, 1).reshape(rows.shape)

    stage.spoil(stage.mover, "copy", copy)


FAULT_CASE = FaultCase(
    title="heads and tokens mixed up",
    place="copy",
    story="sender and receiver disagree whether heads or tokens come first in a page",
    reports=(
        "https://github.com/vllm-project/vllm/issues/49012",
        "https://github.com/vllm-project/vllm/pull/30448",
    ),
    plant=plant,
    finds=("hit kv_data",),
    furnish=copying,
)
