"""SGLang's older radix tree, the default of 0.5.16: nodes have a tensor of slots each, or are on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from canary_obs.engines.sglang.node_tree import NodeTree


class RadixTree(NodeTree):
    """Of models whose layers all have the same slots. With a hierarchical cache nodes may have none."""

    def _slots(self, group: str, nodes: list[Any]) -> list[Tensor]:  # noqa: ARG002 - there is one group
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        return [nothing if node.value is None else node.value for node in nodes]

    def _tokens(self, nodes: list[Any]) -> list[int] | None:
        if all(node.value is not None for node in nodes):
            return None
        return [len(node.key) for node in nodes]

    def _locked(self, group: str, node: Any) -> bool:  # noqa: ARG002 - there is one group
        return bool(node.lock_ref)

    def _held(self, group: str) -> int:  # noqa: ARG002 - there is one group
        return int(self._tree.evictable_size()) + int(self._tree.protected_size())
