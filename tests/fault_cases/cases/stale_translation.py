"""Stale full-to-window map."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.reference_engine.cache.window_slots import Slots
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """The first changes of every step do not reach the device."""
    stage.trust_every_slot()

    def changes(original: Callable[[], tuple[Slots, Slots]]) -> tuple[Slots, Slots]:
        full, mine = original()
        if not stage.warm or full.size < 2:
            return full, mine
        stage.strike()
        return full[2:], mine[2:]

    stage.around(stage.scheduler.windows.slots, "changes", changes)


FAULT_CASE = FaultCase(
    title="stale full-to-window map",
    place="sliding window",
    story="the device keeps an old entry of the map from full slots to window slots",
    reports=(
        "https://github.com/sgl-project/sglang/pull/36372",
        "https://github.com/xLLM-AI/xllm/pull/1594",
    ),
    plant=plant,
    finds=("tail unwritten",),
    engine={"model": "swa"},
)
