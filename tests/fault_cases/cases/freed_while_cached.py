"""Page freed that the cache holds."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.reference_engine.scheduling.request import Request, Status
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """One request's own pages enter the cache just before it leaves, so at its end they count as spare."""

    def release(original: Callable[..., None], request: Request, status: Status) -> None:
        if stage.ripe and request.computed - request.shared > 8:
            stage.cache.insert(request.tokens[: request.computed], request.slots[: request.computed])
            stage.strike()
        original(request, status)

    stage.around(stage.scheduler, "release", release)


FAULT_CASE = FaultCase(
    title="page freed that the cache holds",
    place="prefix cache",
    story="a chunk enters the prefix cache during prefill; dropping the request frees its pages",
    reports=(
        "https://github.com/sgl-project/sglang/issues/38319",
        "https://github.com/sgl-project/sglang/pull/38355",
        "https://github.com/ovg-project/kvcached/issues/362",
    ),
    plant=plant,
    finds=("head position", "tail chain", "tail position"),
    latency=3,
)
