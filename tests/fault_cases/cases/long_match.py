"""Prefix match one too long."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from canary_obs.reference_engine.cache.radix_cache import Node, Slots, Tokens
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def plant(stage: Stage) -> None:
    """One match takes the first page of a branch whose tokens differ."""

    def match(original: Callable[[Tokens], tuple[Slots, Node]], tokens: Tokens) -> tuple[Slots, Node]:
        slots, node = original(tokens)
        rest = tokens[slots.size : slots.size + stage.page]
        if stage.ripe and rest.size == stage.page and slots.size and node.children:
            child = next(iter(node.children.values()))
            if child.tokens.size > stage.page:
                child = stage.cache._split(child, stage.page)
            if child.tokens.size == stage.page and not np.array_equal(child.tokens, rest):
                stage.strike()
                return np.concatenate([slots, child.slots]), child
        return slots, node

    stage.around(stage.cache, "match", match)


FAULT_CASE = FaultCase(
    title="prefix match one too long",
    place="prefix cache",
    story="the match counts one token more than is equal, and that slot holds another request's token",
    reports=(
        "https://github.com/vllm-project/vllm/issues/37076",
        "https://github.com/lablup/mlxcel/issues/1760",
    ),
    plant=plant,
    finds=("head token", "tail chain"),
)
