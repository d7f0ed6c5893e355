"""Cached page handed out between match and lock."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.reference_engine.cache.radix_cache import Node, Slots, Tokens
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """The last page of a fresh match is handed out again, to whoever allocates after the matching request."""
    stolen: list[Slots] = []
    allocations = [0]

    def match(original: Callable[[Tokens], tuple[Slots, Node]], tokens: Tokens) -> tuple[Slots, Node]:
        slots, node = original(tokens)
        if stage.ripe and slots.size and not stolen:
            stolen.append(slots[-stage.page :])
        return slots, node

    def allocate(original: Callable[[int], Slots], pages: int) -> Slots:
        fresh = original(pages)
        if stolen and stage.struck is None:
            allocations[0] += 1
            if allocations[0] > 1:  # the first is the matching request's own
                fresh[: stage.page] = stolen[0]
                stage.strike()
        return fresh

    stage.around(stage.cache, "match", match)
    stage.around(stage.scheduler.allocator, "allocate", allocate)


FAULT_CASE = FaultCase(
    title="cached page handed out between match and lock",
    place="scheduler",
    story="a page found by prefix match is not pinned yet when another request's allocation takes it",
    reports=("https://github.com/vllm-project/vllm/pull/37164",),
    plant=plant,
    finds=("tail chain", "tail position"),
)
