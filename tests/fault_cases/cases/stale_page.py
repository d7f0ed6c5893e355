"""Stale page reused while referenced."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.reference_engine.scheduling.scheduler import Plan
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """A running request's first own page goes back to the free list, as a wrong reference count does."""

    def schedule(original: Callable[[], Plan]) -> Plan:
        if stage.ripe and (victims := stage.veterans(own=8)):
            victim = victims[0]
            stage.scheduler.allocator.free(victim.slots[victim.shared : victim.shared + stage.page])
            stage.strike()
        return original()

    stage.around(stage.scheduler, "schedule", schedule)


FAULT_CASE = FaultCase(
    title="stale page reused while referenced",
    place="allocator",
    story="a page goes back to the free list while a running request reads it; the next owner writes it",
    reports=(
        "https://github.com/Avarok-Cybersecurity/atlas/pull/373",
        "https://github.com/vllm-project/vllm/issues/37076",
    ),
    plant=plant,
    finds=("tail chain", "tail position"),
)
