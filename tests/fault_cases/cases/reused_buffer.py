"""Host buffer reused before the copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from canary_obs.reference_engine.cache.host_tier import HostPage, Slots
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every reload copies the bytes of a page that was offloaded later."""
    tier = stage.scheduler.host_tier

    def load(original: Callable[..., None], pages: Sequence[HostPage], slots: Slots) -> None:
        latest = next(reversed(tier._pages.values()))
        original([latest] * len(pages), slots)

    stage.spoil(tier, "load", load)


FAULT_CASE = FaultCase(
    title="host buffer reused before the copy",
    place="host tier",
    story="a staging buffer takes the next chunk while the last one is still being read",
    reports=(
        "https://github.com/vllm-project/vllm/pull/51667",
        "https://github.com/LMCache/LMCache/pull/4830",
        "https://github.com/sgl-project/sglang/pull/31427",
    ),
    plant=plant,
    finds=("head kv_data",),
    latency=-1,
    engine={"model": "host_tier"},
)
