"""Scales left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from canary_obs.reference_engine.cache.host_tier import HostPage, Slots
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every reload leaves the scales of its slots as they are."""

    def load(original: Callable[..., None], pages: Sequence[HostPage], slots: Slots) -> None:
        scales = [store.scales.clone() for store in stage.pool.stores]
        original(pages, slots)
        for store, before in zip(stage.pool.stores, scales, strict=True):
            store.scales.copy_(before)

    stage.spoil(stage.scheduler.host_tier, "load", load)


FAULT_CASE = FaultCase(
    title="scales left behind",
    place="host tier",
    story="a quantised page comes back from the host without its scales",
    reports=(
        "https://github.com/kekzl/imp/pull/1189",
        "https://github.com/vllm-project/vllm/issues/50702",
    ),
    plant=plant,
    finds=("head kv_data",),
    latency=-1,
    engine={"model": "int8", "page_size": 4, "host_pages": 64},
)
