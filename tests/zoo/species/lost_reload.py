"""Reload that never came."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from canary_obs.engines.reference.host_tier import HostPage, Slots
from tests.zoo.specimen import Specimen
from tests.zoo.stage import Stage


def plant(stage: Stage) -> None:
    """No reload moves anything."""
    tier = stage.scheduler.host_tier

    def load(original: Callable[..., None], pages: Sequence[HostPage], slots: Slots) -> None:
        if not stage.warm:
            original(pages, slots)
            return
        stage.strike()
        return

    stage.around(tier, "load", load)


SPECIMEN = Specimen(
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
