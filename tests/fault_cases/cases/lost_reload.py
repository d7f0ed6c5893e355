"""Reload that never came."""

from __future__ import annotations

from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """No reload moves anything."""
    stage.spoil(stage.scheduler.host_tier, "load", lambda *_: None)


FAULT_CASE = FaultCase(
    title="reload that never came",
    place="host tier",
    story="a failed load is reported as done",
    reports=(
        "https://github.com/vllm-project/vllm/issues/52234",
        "https://github.com/sgl-project/sglang/issues/9266",
    ),
    plant=plant,
    finds=("head kv_data",),
    latency=-1,
    engine={"model": "host_tier"},
)
