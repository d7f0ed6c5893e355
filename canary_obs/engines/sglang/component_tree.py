"""SGLang 0.5.16's tree of models with sliding windows or states: nodes have slots of each kind of layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from canary_obs.engines.sglang.groups import FULL, SWA
from canary_obs.engines.sglang.node_tree import NodeTree
from canary_obs.engines.sglang.node_walk import NodeWalk
from canary_obs.engines.sglang.states import STATE

_COMPONENTS = {FULL: 0, SWA: 1, STATE: 2}  # by SGLang's ComponentType


class ComponentTree(NodeTree):
    """A node whose tokens have left the window keeps its full slots, and has no others. Some have a state."""

    def swa_resident(self, group: str, slots: Tensor) -> Tensor | None:
        """bool [n]: by the allocator's mapping; None = there is no window group. Waits for the device."""
        if (windows := self._own_slots.get(SWA)) is None:
            return None
        if group in self._windowed or not slots.numel():
            return slots > 0
        return (windows[slots.to(self._device)] > 0).cpu()

    def _walk(self, group: str, nodes: list[Any], parents: list[int]) -> NodeWalk:
        if group != STATE:
            return super()._walk(group, nodes, parents)
        self._marks[group] = self._freed[group].mark()
        follow_none = [-1] * len(nodes)
        return NodeWalk(self._slots(group, nodes), follow_none, self._copies, self._freed[group])

    def _slots(self, group: str, nodes: list[Any]) -> list[Tensor]:
        number, none = _COMPONENTS[group], torch.empty(0, dtype=torch.int64, device=self._device)
        found = [node.component_data[number].value for node in nodes]
        return [none if slots is None else slots for slots in found]

    def _tokens(self, nodes: list[Any]) -> list[int]:
        return [len(node.key) for node in nodes]

    def _locked(self, group: str, node: Any) -> bool:
        return bool(node.component_data[_COMPONENTS[group]].lock_ref)
