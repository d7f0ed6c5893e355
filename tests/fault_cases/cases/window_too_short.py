"""Window slot freed too early."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.reference_engine.scheduling.request import Request
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """The eviction frontier of running requests runs six positions ahead."""
    stage.trust_every_slot()

    def first_seen(original: Callable[[Request], int], request: Request) -> int:
        seen = original(request)
        if not stage.warm or seen == 0:
            return seen
        stage.strike()
        return min(seen + 6, request.computed)

    stage.around(stage.scheduler.windows, "_first_seen", first_seen)


FAULT_CASE = FaultCase(
    title="window slot freed too early",
    place="sliding window",
    story="the window is counted short: slots are freed and reused while a request still sees them",
    reports=(
        "https://github.com/vllm-project/vllm-ascend/issues/14055",
        "https://github.com/sgl-project/sglang/pull/29860",
        "https://github.com/vllm-project/vllm/pull/23480",
    ),
    plant=plant,
    finds=("head unwritten",),
    engine={"model": "swa"},
)
