"""Chunk written twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from canary_obs.reference_engine.cache.host_tier import HostPage, Slots
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """The first page of every reload is written after itself once more."""

    def load(original: Callable[..., None], pages: Sequence[HostPage], slots: Slots) -> None:
        original(pages, slots)
        original(pages[:1], (slots[: stage.page] + stage.page) % stage.pool.num_slots)

    stage.spoil(stage.scheduler.host_tier, "load", load)


FAULT_CASE = FaultCase(
    title="chunk written twice",
    place="host tier",
    story="a page is written to the next page's place as well",
    reports=(
        "https://github.com/vllm-project/vllm/pull/51667",
        "https://github.com/LMCache/LMCache/pull/4830",
    ),
    plant=plant,
    finds=("tail kv_data",),
    engine={"model": "host_tier"},
)
