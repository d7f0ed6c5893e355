"""Slot off by one."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.scheduler import Plan
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage, changed, edited


def plant(stage: Stage) -> None:
    """The KV of one chunk of a prompt goes to the next slots; the slot table is right."""

    def prepare(original: Callable[[Plan], ForwardBatch], plan: Plan) -> ForwardBatch:
        batch = original(plan)
        longest = max(range(len(batch.extends)), key=batch.extends.__getitem__)
        if stage.ripe and batch.extends[longest] > 8:
            start = int(batch.token_starts[longest])
            chunk = slice(start, start + batch.extends[longest])
            slots = (batch.out_slots[chunk] + 1) % stage.pool.num_slots
            batch = changed(batch, out_slots=edited(batch.out_slots, chunk, slots))
            stage.strike()
        return batch

    stage.around(stage.runner, "prepare", prepare)


FAULT_CASE = FaultCase(
    title="slot off by one",
    place="slot mapping",
    story="the slot mapping of new tokens points one slot further than the table they will be read through",
    reports=(
        "https://github.com/sgl-project/sglang/issues/22819",
        "https://github.com/huggingface/text-generation-inference/pull/2711",
    ),
    plant=plant,
    finds=("tail chain", "tail position"),
)
