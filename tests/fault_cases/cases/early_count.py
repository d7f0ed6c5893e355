"""Counted before it is computed."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.reference_engine.scheduling.request import Request, Status
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """Every request that leaves gives its last, uncomputed token to the prefix cache as well."""

    def release(original: Callable[..., None], request: Request, status: Status) -> None:
        if stage.warm and request.length > request.computed:
            request.computed += 1
            stage.strike()
        original(request, status)

    stage.around(stage.scheduler, "release", release)


FAULT_CASE = FaultCase(
    title="counted before it is computed",
    place="scheduler",
    story="a token that was sampled or drafted but not put through the model is counted as computed",
    reports=(
        "https://github.com/openvinotoolkit/openvino.genai/issues/4190",
        "https://github.com/vllm-project/vllm/pull/18668",
    ),
    plant=plant,
    finds=("sweep position",),
    latency=6,
    engine={"num_slots": 512},
)
