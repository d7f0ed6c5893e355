"""Stale slot-table row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.request import Request
from canary_obs.reference_engine.scheduling.scheduler import Plan
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """The shared prefix of one admitted request is not written to its row, which holds other slots."""

    def stale(request: Request) -> bool:
        row = stage.pool.req_to_token[request.row, : request.shared]
        return int((row.long() != torch.from_numpy(request.slots[: request.shared])).sum()) > 8

    def prepare(original: Callable[[Plan], ForwardBatch], plan: Plan) -> ForwardBatch:
        victims = [request for request in plan.admitted if stale(request)]
        if stage.ripe and victims:
            plan = replace(plan, admitted=tuple(r for r in plan.admitted if r is not victims[0]))
            stage.strike()
        return original(plan)

    stage.around(stage.runner, "prepare", prepare)


FAULT_CASE = FaultCase(
    title="stale slot-table row",
    place="slot table",
    story="a row is reused (after preemption, or by a new request) with the slots of its last owner in it",
    reports=("https://github.com/gittensor-ai-lab/sparkinfer/pull/146",),
    plant=plant,
    finds=("tail chain", "tail position"),
)
