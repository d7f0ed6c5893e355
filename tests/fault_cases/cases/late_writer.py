"""Late write of a request that left."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from canary_obs.reference_engine.scheduling.request import Request, Status
from canary_obs.reference_engine.scheduling.scheduler import Plan
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """What a request's last forward wrote is written again once its slots have another owner."""
    last: list[tuple[Tensor, Tensor, Tensor]] = []  # of the last forward: slots, key, value by layer
    pending: list[tuple[Tensor, Tensor, Tensor]] = []  # of the request that left

    def write(original: Callable[..., None], layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        original(layer, slots, key, value)
        last[layer:] = [(slots, key.clone(), value.clone())]

    def release(original: Callable[..., None], request: Request, status: Status) -> None:
        if stage.ripe and not pending:
            mine = torch.isin(last[0][0], torch.from_numpy(request.slots[: request.allocated]))
            pending.extend((slots[mine], key[mine], value[mine]) for slots, key, value in last)
        original(request, status)

    def schedule(original: Callable[[], Plan]) -> Plan:
        plan = original()
        for request in stage.veterans(shortest=8):
            if stage.ripe and pending and request in plan.requests:
                slots, key, _ = pending[0]
                other = (stage.pool.stores[0].tensors()[0][slots] != key).flatten(1).any(1)
                if (other & torch.isin(slots, torch.from_numpy(request.slots[: request.computed]))).any():
                    for layer, written in enumerate(pending):
                        stage.pool.stores[layer].write(*written)
                    stage.strike()
        return plan

    stage.around(stage.pool, "write", write)
    stage.around(stage.scheduler, "release", release)
    stage.around(stage.scheduler, "schedule", schedule)


FAULT_CASE = FaultCase(
    title="late write of a request that left",
    place="scheduler",
    story="pages are freed at abort, preemption or end while a write to them is under way",
    reports=(
        "https://github.com/sgl-project/sglang/issues/24527",
        "https://github.com/sgl-project/sglang/pull/35049",
        "https://github.com/vllm-project/vllm/pull/45357",
        "https://github.com/vllm-project/vllm/pull/32255",
    ),
    plant=plant,
    finds=("tail kv_data",),
)
