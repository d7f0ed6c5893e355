"""Wrong position after chunked prefill."""

from __future__ import annotations

from collections.abc import Callable

import torch

from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.scheduler import Plan
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage, changed, edited


def plant(stage: Stage) -> None:
    """The positions of one later chunk of a prompt start from 0 again."""

    def prepare(original: Callable[[Plan], ForwardBatch], plan: Plan) -> ForwardBatch:
        batch = original(plan)
        for index, (prefix, extend) in enumerate(zip(batch.prefixes, batch.extends, strict=True)):
            if stage.ripe and prefix and extend > 1:
                start = int(batch.token_starts[index])
                restarted = edited(batch.positions, slice(start, start + extend), torch.arange(extend))
                batch = changed(batch, positions=restarted)
                stage.strike()
        return batch

    stage.around(stage.runner, "prepare", prepare)


FAULT_CASE = FaultCase(
    title="wrong position after chunked prefill",
    place="input batch",
    story="position ids of a later chunk count from the chunk, not from the prompt",
    reports=(
        "https://github.com/huggingface/transformers/issues/43082",
        "https://github.com/vllm-project/vllm/pull/10388",
        "https://github.com/Blaizzy/mlx-vlm/issues/1983",
    ),
    plant=plant,
    finds=("head write_position",),
)
