"""Page numbers taken for slots."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.fault_cases.case import FaultCase
from tests.fault_cases.mover import copying
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every copy addresses the pages of index keys by the numbers of slots; those beyond the pool wrap."""
    index = stage.pool.index

    def copy_index(_: Callable[..., None], source: Tensor, target: Tensor) -> None:
        pages = stage.pool.num_slots // stage.page
        for held in (index.keys, index.scales):
            held[:, target % pages] = held[:, source % pages]

    stage.spoil(stage.mover, "copy_index", copy_index)


FAULT_CASE = FaultCase(
    title="page numbers taken for slots",
    place="copy",
    story="a copy indexes a cache that is laid out by pages with the slots of tokens",
    reports=(
        "https://github.com/sgl-project/sglang/pull/31218",
        "https://github.com/sgl-project/sglang/pull/31215",
    ),
    plant=plant,
    finds=("hit kv_data", "tail kv_data"),
    furnish=copying,
    engine={"model": "mla_sparse", "num_slots": 512},
)
