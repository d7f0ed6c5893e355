"""Prefix key without adapter or image."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from canary_obs.reference_engine.cache.radix_cache import Tokens
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.request import Request
from canary_obs.reference_engine.scheduling.scheduler import Plan
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def adapters(stage: Stage) -> None:
    """Every second request runs with an adapter: other KV for the same tokens, and a cache key of its own."""
    asking: list[Request] = []  # whose tokens the cache is being given
    shifts: list[Tensor] = []  # of the batch's tokens

    def remember(original: Callable[..., object], request: Request, *given: object) -> object:
        asking[:] = [request]
        return original(request, *given)

    def keyed(original: Callable[..., object], tokens: Tokens, *given: object) -> object:
        return original(tokens + 1000 * stage.key_of(asking[0]), *given)

    def prepare(original: Callable[[Plan], ForwardBatch], plan: Plan) -> ForwardBatch:
        batch = original(plan)
        shift = torch.tensor([request.serial % 2 for request in batch.requests])
        shifts[:] = [shift.repeat_interleave(batch.extend_lens)]
        return batch

    def forward(original: Callable[..., Tensor], input_ids: Tensor, *given: object) -> Tensor:
        return original((input_ids + 9 * shifts[0]) % stage.runner.model.shape.vocab_size, *given)

    stage.around(stage.scheduler, "_admit", remember)
    stage.around(stage.scheduler, "release", remember)
    stage.around(stage.cache, "match", keyed)
    stage.around(stage.cache, "insert", keyed)
    stage.around(stage.runner, "prepare", prepare)
    stage.around(stage.runner.model, "forward", forward)


def plant(stage: Stage) -> None:
    """The key leaves the adapter out."""

    def key_of(request: Request) -> int:
        if stage.warm:
            stage.strike()
        return 0

    vars(stage)["key_of"] = key_of


FAULT_CASE = FaultCase(
    title="prefix key without adapter or image",
    place="prefix cache",
    story="requests with the same tokens but another adapter, image or salt share cached KV",
    reports=(
        "https://github.com/LMCache/LMCache/issues/4086",
        "https://github.com/LMCache/LMCache/issues/690",
        "https://github.com/ROCm/ATOM/pull/1358",
        "https://github.com/vllm-project/vllm/pull/54342",
        "https://github.com/sgl-project/sglang/issues/24568",
    ),
    plant=plant,
    furnish=adapters,
    missed="tokens, positions and bytes agree; an adapter must give salted tokens to make the key visible",
)
