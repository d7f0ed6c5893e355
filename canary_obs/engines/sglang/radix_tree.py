"""SGLang's older radix tree, the default of 0.5.16, as sweeps read it: by its nodes, a tensor each."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from canary_obs.engine_api.views import CachedSlots
from canary_obs.engines.sglang.prefix_tree import LONGEST_WALK_SECONDS, PrefixTree, walk_too_long

_NODES_BETWEEN = 256  # two readings of the clock


class RadixTree(PrefixTree):
    """Nodes hold their slots on the engine's device: these are joined there and come in one copy."""

    def cached(self, group: str, *, unlocked_only: bool) -> CachedSlots:
        """Every slot of the tree's nodes; of those that no running request has locked.

        The cache may hold any number of tokens: the walk takes time for its nodes.
        """
        values, depths, parents, unlocked = self._nodes()
        self._marks[group] = self._freed[group].mark()
        lengths = torch.tensor([value.numel() for value in values], dtype=torch.int64)
        slots = torch.cat(values).cpu() if values else torch.zeros(0, dtype=torch.int64)
        slots, ends = slots.to(torch.int64), lengths.cumsum(0)
        starts, previous = ends - lengths, torch.empty_like(slots)
        previous[1:] = slots[:-1]
        places = torch.tensor(parents, dtype=torch.int64)
        # A node without slots has no last one; its children, if any, follow what it follows.
        last = slots[(ends - 1).clamp_(min=0)] if slots.numel() else ends
        filled = lengths > 0
        before = torch.where(places >= 0, last[places.clamp(min=0)], -1) if places.numel() else places
        previous[starts[filled]] = before[filled]
        positions = torch.arange(slots.numel()) + torch.repeat_interleave(
            torch.tensor(depths, dtype=torch.int64) - starts, lengths
        )
        if not unlocked_only:
            return CachedSlots(slots=slots, positions=positions, previous=previous)
        kept = torch.repeat_interleave(torch.tensor(unlocked, dtype=torch.bool), lengths)
        return CachedSlots(slots=slots[kept], positions=positions[kept], previous=previous[kept])

    def _nodes(self) -> tuple[list[Tensor], list[int], list[int], list[bool]]:
        """Of each node: its slots, its first position, the place of its parent (-1 = the root), unlocked."""
        values, depths, parents, unlocked = list[Tensor](), list[int](), list[int](), list[bool]()
        deadline = time.perf_counter() + LONGEST_WALK_SECONDS
        waiting: list[tuple[Any, int, int]] = [(self._tree.root_node, 0, -1)]
        while waiting:
            node, depth, place = waiting.pop()
            for child in node.children.values():
                value = child.value
                waiting.append((child, depth + len(value), len(values)))
                values.append(value)
                depths.append(depth)
                parents.append(place)
                unlocked.append(child.lock_ref == 0)
            if len(values) % _NODES_BETWEEN == 0 and time.perf_counter() > deadline:
                raise walk_too_long(f"{self._held('full')} tokens", None)
        return values, depths, parents, unlocked

    def _held(self, group: str) -> int:
        del group  # it has no windows
        return int(self._tree.evictable_size()) + int(self._tree.protected_size())
