"""Rotary position drift."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.scheduler import Plan
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage, changed


def plant(stage: Stage) -> None:
    """Every position of one forward is one too small, as after an offset counted one short."""

    def prepare(original: Callable[[Plan], ForwardBatch], plan: Plan) -> ForwardBatch:
        batch = original(plan)
        if stage.ripe and min(batch.prefixes) > 0:
            batch = changed(batch, positions=batch.positions - 1)
            stage.strike()
        return batch

    stage.around(stage.runner, "prepare", prepare)


FAULT_CASE = FaultCase(
    title="rotary position drift",
    place="input batch",
    story="a cache offset counted one short shifts the rotary positions of everything after it",
    reports=(
        "https://github.com/waybarrios/vllm-mlx/pull/311",
        "https://github.com/mlx-node/mlx-node/pull/33",
    ),
    plant=plant,
    finds=("head write_position",),
)
