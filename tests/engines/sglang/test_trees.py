"""Which of the trees a scheduler's prefix cache is read as."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang.chunk_cache import CHUNK_CACHES, EmptyTree
from canary_obs.engines.sglang.component_tree import ComponentTree
from canary_obs.engines.sglang.prefix_tree import PrefixTree
from canary_obs.engines.sglang.radix_tree import RadixTree
from canary_obs.engines.sglang.trees import prefix_tree
from canary_obs.engines.toolkit.forward_stream import ForwardStream

CPU = torch.device("cpu")


def _group(name: str, ratio: int, window: int | None) -> Any:
    return SimpleNamespace(view=SimpleNamespace(name=name, window=window), ratio=ratio)


@pytest.mark.parametrize(
    ("name", "attributes", "kind"),
    [
        ("UnifiedRadixCache", {"tree_core": object()}, PrefixTree),
        ("UnifiedRadixCache", {}, ComponentTree),
        ("RadixCache", {}, RadixTree),
        ("HiRadixCache", {}, RadixTree),
        *((name, {}, EmptyTree) for name in CHUNK_CACHES),
    ],
)
def test_each_prefix_cache_is_read_by_its_own_nodes(
    name: str, attributes: dict[str, Any], kind: type[PrefixTree]
) -> None:
    """UnifiedRadixCache of 0.5.23 has a core, which walks itself; that of 0.5.16 has none."""
    cache = type(name, (), attributes)()
    groups = [_group("full", 1, None), _group("swa", 1, 64), _group("c4", 4, None)]
    tree = prefix_tree(cache, groups, {}, {}, CPU, ForwardStream(CPU))
    assert type(tree) is kind
    if kind is PrefixTree:
        assert tree._windowed == {"swa"}
        assert tree._ratios == {"c4": 4}
