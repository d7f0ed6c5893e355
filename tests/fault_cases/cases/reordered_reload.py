"""Reload in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from canary_obs.reference_engine.cache.host_tier import HostPage, Slots
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every reload fills its slots in reverse."""

    def load(original: Callable[..., None], pages: Sequence[HostPage], slots: Slots) -> None:
        original(pages, slots[::-1].copy())

    stage.spoil(stage.scheduler.host_tier, "load", load)


FAULT_CASE = FaultCase(
    title="reload in another order",
    place="host tier",
    story="pages of one prefix come back in each other's place",
    reports=(
        "https://github.com/NVIDIA/TensorRT-LLM/pull/18657",
        "https://github.com/kvcache-ai/Mooncake/issues/4153",
    ),
    plant=plant,
    finds=("head kv_data",),
    latency=-1,
    engine={"model": "host_tier"},
)
