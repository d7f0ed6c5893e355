"""Which prefix cache a scheduler has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from canary_obs.copy_records.draft_trees import SlotMap
from canary_obs.engines.sglang.chunk_cache import CHUNK_CACHES, EmptyTree
from canary_obs.engines.sglang.component_tree import ComponentTree
from canary_obs.engines.sglang.freed_slots import FreedSlots
from canary_obs.engines.sglang.groups import SglangGroup
from canary_obs.engines.sglang.prefix_tree import PrefixTree
from canary_obs.engines.sglang.radix_tree import RadixTree
from canary_obs.engines.toolkit.forward_stream import ForwardStream


def prefix_tree(
    cache: Any, groups: Sequence[SglangGroup], freed: Mapping[str, FreedSlots], apart: Mapping[str, SlotMap],
    device: torch.device, scheduler: ForwardStream,
) -> PrefixTree:  # fmt: skip
    """What sweeps read. `apart`: slots of groups that have their own; the rest as in NodeTree."""
    if hasattr(cache, "tree_core"):  # only the newer tree has one
        ratios = {group.view.name: group.ratio for group in groups if group.ratio > 1}
        windowed = [group.view.name for group in groups if group.view.window is not None]
        return PrefixTree(cache, freed, apart, ratios, windowed)
    if type(cache).__name__ in CHUNK_CACHES:
        return EmptyTree(cache, freed, apart, device=device, scheduler=scheduler)
    kind = ComponentTree if type(cache).__name__ == "UnifiedRadixCache" else RadixTree
    return kind(cache, freed, apart, device=device, scheduler=scheduler)
