"""Hash-collision prefix hit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from canary_obs.reference_engine.cache.radix_cache import Node, Slots, Tokens
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import Stage


def path_of(node: Node) -> tuple[Tokens, Slots]:
    """Tokens and slots from the root to a node."""
    tokens, slots = [node.tokens], [node.slots]
    while node.parent is not None:
        node = node.parent
        tokens.append(node.tokens)
        slots.append(node.slots)
    return np.concatenate(tokens[::-1]), np.concatenate(slots[::-1])


def plant(stage: Stage) -> None:
    """One match returns the path of another prompt."""

    def match(original: Callable[[Tokens], tuple[Slots, Node]], tokens: Tokens) -> tuple[Slots, Node]:
        if stage.ripe:
            for leaf in sorted(stage.cache._leaves, key=lambda node: node.serial):
                held, slots = path_of(leaf)
                if held.size <= tokens.size and not np.array_equal(held, tokens[: held.size]):
                    stage.strike()
                    return slots, leaf
        return original(tokens)

    stage.around(stage.cache, "match", match)


FAULT_CASE = FaultCase(
    title="hash-collision prefix hit",
    place="prefix cache",
    story="two prompts share a hash, so a request starts on another prompt's KV",
    reports=(
        "https://github.com/openvinotoolkit/openvino.genai/issues/3722",
        "https://github.com/vllm-project/vllm/pull/12621",
        "https://github.com/vllm-project/aibrix/issues/749",
    ),
    plant=plant,
    finds=("head token", "tail chain"),
)
