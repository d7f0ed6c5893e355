"""Stale computed count."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.reference_engine.scheduling.request import Request
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every admitted prompt counts four tokens more than its match."""

    def admit(original: Callable[..., bool], request: Request, *given: object) -> bool:
        admitted = original(request, *given)
        if stage.warm and admitted and request.remaining > 4:
            request.computed += 4
            stage.strike()
        return admitted

    stage.around(stage.scheduler, "_admit", admit)


FAULT_CASE = FaultCase(
    title="stale computed count",
    place="scheduler",
    story="a request is admitted with the cached-token count of an earlier look-up, of which part is gone",
    reports=(
        "https://github.com/vllm-project/vllm/pull/17305",
        "https://github.com/RedHeartSecretMan/vllm-oxide/issues/40",
    ),
    plant=plant,
    finds=("head position", "tail chain"),
)
