"""SGLang's older radix tree, the default of 0.5.16: nodes have a tensor of slots each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from canary_obs.engines.sglang.node_tree import NodeTree


class RadixTree(NodeTree):
    """Of models whose layers all have the same slots."""

    def _slots(self, group: str, nodes: list[Any]) -> list[Tensor]:  # noqa: ARG002 - there is one group
        return [node.value for node in nodes]

    def _tokens(self, nodes: list[Any]) -> None:
        pass

    def _locked(self, group: str, node: Any) -> bool:  # noqa: ARG002 - there is one group
        return bool(node.lock_ref)

    def _held(self, group: str) -> int:  # noqa: ARG002 - there is one group
        return int(self._tree.evictable_size()) + int(self._tree.protected_size())
