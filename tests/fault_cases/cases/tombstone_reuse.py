"""Sliding-window tombstone reuse."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.reference_engine.cache.window_slots import Slots
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every match counts as resumable, whatever its window holds."""
    stage.trust_every_slot()

    def resumable(original: Callable[[Slots, int], int], full: Slots, page_size: int) -> int:
        length = original(full, page_size)
        if not stage.warm or length == full.size:
            return length
        stage.strike()
        return full.size - full.size % page_size

    stage.around(stage.scheduler.windows.slots, "resumable", resumable)


FAULT_CASE = FaultCase(
    title="sliding-window tombstone reuse",
    place="sliding window",
    story="a prefix hit resumes where window slots are tombstones, so the window reads slots of others",
    reports=(
        "https://github.com/ovg-project/kvcached/issues/446",
        "https://github.com/raullenchai/Rapid-MLX/pull/1124",
    ),
    plant=plant,
    finds=("head unwritten",),
    engine={"model": "swa"},
)
