"""Reload to the wrong slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from canary_obs.reference_engine.cache.host_tier import HostPage, Slots
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every reload lands one page further."""

    def load(original: Callable[..., None], pages: Sequence[HostPage], slots: Slots) -> None:
        original(pages, (slots + stage.page) % stage.pool.num_slots)

    stage.spoil(stage.scheduler.host_tier, "load", load)


FAULT_CASE = FaultCase(
    title="reload to the wrong slots",
    place="host tier",
    story="pages come back from the host one page off",
    reports=(
        "https://github.com/sgl-project/sglang/issues/39830",
        "https://github.com/kvcache-ai/Mooncake/issues/4153",
    ),
    plant=plant,
    finds=("head kv_data",),
    latency=-1,
    engine={"model": "host_tier"},
)
