"""Cross-request row mix-up."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.reference_engine.scheduling.scheduler import Plan
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Two running requests change rows; the table stays as it was."""

    def schedule(original: Callable[[], Plan]) -> Plan:
        pair = stage.veterans(shortest=8)[:2]
        if stage.ripe and len(pair) == 2:
            one, other = pair
            one.row, other.row = other.row, one.row
            stage.strike()
        return original()

    stage.around(stage.scheduler, "schedule", schedule)


FAULT_CASE = FaultCase(
    title="cross-request row mix-up",
    place="slot table",
    story="the rows of two running requests are exchanged: each reads the other's context",
    reports=(
        "https://github.com/tanishqkumar/ssd/issues/23",
        "https://github.com/NVIDIA/TensorRT-LLM/pull/13278",
    ),
    plant=plant,
    finds=("head position", "head token", "tail chain", "tail position"),
)
