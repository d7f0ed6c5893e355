"""SGLang 0.5.16 without a prefix cache, as on servers that decode only: nothing is kept between requests."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from canary_obs.engines.sglang.groups import SWA
from canary_obs.engines.sglang.node_tree import NodeTree

CHUNK_CACHES = ("ChunkCache", "SWAChunkCache")  # classes


class EmptyTree(NodeTree):
    """Has no nodes: a sweep of it ends at once."""

    def swa_resident(self, group: str, slots: Tensor) -> Tensor | None:  # noqa: ARG002 - there are none
        """bool [0]; None = there is no window group."""
        return slots > 0 if SWA in self._own_slots else None

    def _slots(self, group: str, nodes: list[Any]) -> list[Tensor]:  # noqa: ARG002 - there are none
        return []

    def _tokens(self, nodes: list[Any]) -> list[int] | None:  # noqa: ARG002 - there are none
        return None

    def _locked(self, group: str, node: Any) -> bool:  # noqa: ARG002 - there are none
        return False

    def _nodes(self) -> tuple[list[Any], list[int]]:
        return [], []

    def _held(self, group: str) -> int:  # noqa: ARG002 - of none
        return 0
