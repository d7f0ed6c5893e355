"""Double free."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.reference_engine.cache.radix_cache import Slots
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """One call's pages enter the free list twice."""

    def free(original: Callable[[Slots], None], slots: Slots) -> None:
        original(slots)
        if stage.ripe and slots.size >= 2 * stage.page:
            original(slots)
            stage.strike()

    stage.around(stage.scheduler.allocator, "free", free)


FAULT_CASE = FaultCase(
    title="double free",
    place="allocator",
    story="pages are freed twice, so the free list holds them twice and two owners get each",
    reports=(
        "https://github.com/LMCache/LMCache/issues/5005",
        "https://github.com/ModelEngine-Group/unified-cache-management/pull/1053",
        "https://github.com/sgl-project/sglang/pull/38941",
    ),
    plant=plant,
    finds=("tail chain", "tail position"),
    latency=1,
    elsewhere="an assertion, where the allocator has one (SGLang's free_segments, our PoolError)",
)
