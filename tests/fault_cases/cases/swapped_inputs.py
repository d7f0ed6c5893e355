"""Two requests swapped in the batch."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.scheduler import Plan
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage, changed


def plant(stage: Stage) -> None:
    """Two decoding requests get each other's input token."""

    def prepare(original: Callable[[Plan], ForwardBatch], plan: Plan) -> ForwardBatch:
        batch = original(plan)
        tokens = batch.token_starts[stage.decoding(batch)]
        if stage.ripe and len(tokens) > 1 and batch.input_ids[tokens[0]] != batch.input_ids[tokens[1]]:
            ids = batch.input_ids.clone()
            ids[tokens[:2]] = ids[tokens[:2].flip(0)]
            batch = changed(batch, input_ids=ids)
            stage.strike()
        return batch

    stage.around(stage.runner, "prepare", prepare)


FAULT_CASE = FaultCase(
    title="two requests swapped in the batch",
    place="input batch",
    story="a reordered batch scatters the sampled tokens in the old order: each gets another's token",
    reports=("https://github.com/vllm-project/vllm/pull/43434",),
    plant=plant,
    finds=("head write_token",),
)
