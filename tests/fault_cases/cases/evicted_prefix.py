"""Eviction of a running prefix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from canary_obs.reference_engine.cache.radix_cache import Node
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.scheduler import Plan
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Locking starts at the parent: the node a request ends at can be evicted under it."""

    def skip(original: Callable[[Node], None], node: Node) -> None:
        if node.parent is not None:  # the root stays, an evicted node has lost its path
            original(node.parent)

    def prepare(original: Callable[[Plan], ForwardBatch], plan: Plan) -> ForwardBatch:
        batch = original(plan)
        shared = [request.slots[: request.shared] for request in plan.requests]
        if stage.struck is None and np.isin(batch.out_slots.numpy(), np.concatenate(shared)).any():
            stage.strike()
        return batch

    stage.around(stage.cache, "lock", skip)
    stage.around(stage.cache, "unlock", skip)
    stage.around(stage.runner, "prepare", prepare)


FAULT_CASE = FaultCase(
    title="eviction of a running prefix",
    place="prefix cache",
    story="locking a matched path skips the node it ends at, so eviction takes what a running request reads",
    reports=(
        "https://github.com/sgl-project/mini-sglang/pull/52",
        "https://github.com/Avarok-Cybersecurity/atlas/pull/158",
    ),
    plant=plant,
    finds=("tail chain", "tail position"),
)
