"""Stale input token."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.scheduler import Plan
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage, changed, edited


def plant(stage: Stage) -> None:
    """One decoding request is fed the token before its last one."""

    def prepare(original: Callable[[Plan], ForwardBatch], plan: Plan) -> ForwardBatch:
        batch = original(plan)
        for index in stage.decoding(batch):
            request, place = batch.requests[index], int(batch.token_starts[index])
            before = int(request.tokens[request.computed - 1])
            if stage.ripe and before != int(batch.input_ids[place]):
                batch = changed(batch, input_ids=edited(batch.input_ids, place, before))
                stage.strike()
        return batch

    stage.around(stage.runner, "prepare", prepare)


FAULT_CASE = FaultCase(
    title="stale input token",
    place="input batch",
    story="an overlapped scheduler feeds the token sampled one step earlier",
    reports=(
        "https://github.com/tenstorrent/tt-metal/pull/47359",
        "https://github.com/tenstorrent/vllm/issues/395",
        "https://github.com/vllm-project/vllm/issues/42490",
    ),
    plant=plant,
    finds=("head write_token",),
)
