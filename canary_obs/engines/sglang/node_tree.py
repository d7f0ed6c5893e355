"""SGLang's trees as sweeps read them by their nodes, whose slots are tensors on the engine's device."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canary_obs.copy_records.draft_trees import SlotMap
from canary_obs.engine_api.views import CachedSlots
from canary_obs.engine_api.walks import CachedWalk
from canary_obs.engines.sglang.freed_slots import FreedSlots
from canary_obs.engines.sglang.node_walk import NodeWalk, SlotCopies
from canary_obs.engines.sglang.prefix_tree import LONGEST_WALK_SECONDS, PrefixTree, walk_too_long
from canary_obs.engines.toolkit.forward_stream import ForwardStream

_NODES_BETWEEN = 256  # two readings of the clock


class NodeTree(PrefixTree):
    """Slots are joined on the device, and come piece by piece.

    The cache may hold any number of tokens: a sweep begins by listing its nodes.
    """

    def __init__(
        self,
        tree: Any,
        freed: Mapping[str, FreedSlots],
        own_slots: Mapping[str, SlotMap] = MappingProxyType({}),
        *,
        device: torch.device,
        scheduler: ForwardStream,
    ) -> None:
        """As a PrefixTree. `device`: of the slots; `scheduler`: its stream there."""
        super().__init__(tree, freed, own_slots)
        self._device, self._copies = device, SlotCopies(device, scheduler)

    def walk(self, group: str) -> CachedWalk:
        """Every slot of the tree's nodes, some at a time."""
        return self._walk(group, *self._nodes())

    def cached(self, group: str, *, unlocked_only: bool) -> CachedSlots:
        """Every slot of the tree's nodes; of those that no running request locked. Waits for the device."""
        nodes, parents = self._nodes()
        found = self._walk(group, nodes, parents).at_once()
        if not unlocked_only:
            return found
        unlocked = np.array([not self._locked(group, node) for node in nodes], dtype=np.bool_)
        kept = torch.from_numpy(np.repeat(unlocked, [slots.numel() for slots in self._slots(group, nodes)]))
        return CachedSlots(
            slots=found.slots[kept], positions=found.positions[kept], previous=found.previous[kept]
        )

    def _walk(self, group: str, nodes: list[Any], parents: list[int]) -> NodeWalk:
        self._marks[group] = self._freed[group].mark()
        slots, tokens = self._slots(group, nodes), self._tokens(nodes)
        return NodeWalk(slots, parents, self._copies, self._freed[group], tokens)

    @abstractmethod
    def _slots(self, group: str, nodes: list[Any]) -> list[Tensor]:
        """Of each node, on the device."""

    @abstractmethod
    def _tokens(self, nodes: list[Any]) -> list[int] | None:
        """Of each node; None = as many as slots."""

    @abstractmethod
    def _locked(self, group: str, node: Any) -> bool:
        """Whether a running request holds on to the node's slots."""

    def _nodes(self) -> tuple[list[Any], list[int]]:
        """All but the root, and the place of the parent of each (-1 = the root)."""
        nodes, parents, checked = list[Any](), list[int](), _NODES_BETWEEN
        deadline = time.thread_time() + LONGEST_WALK_SECONDS
        waiting: list[tuple[Any, int]] = [(self._tree.root_node, -1)]
        while waiting:
            node, place = waiting.pop()
            children = node.children.values()
            first = len(nodes)
            nodes += children
            parents += [place] * len(children)
            waiting += [(child, number) for number, child in enumerate(children, first) if child.children]
            if len(nodes) >= checked:
                checked = len(nodes) + _NODES_BETWEEN
                if time.thread_time() > deadline:
                    raise walk_too_long(f"{self._held('full')} tokens", None)
        return nodes, parents
