"""Sparse attention after DeepSeek-V3.2: an indexer scores earlier tokens, attention reads the best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from canary_obs.reference_engine.model.compression import highest
from canary_obs.reference_engine.model.rotary import Turn, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseShape:
    """Sizes of the indexer, in elements."""

    heads: int = 2
    size: int = 16  # of an index key
    top_k: int = 16  # tokens that attention reads

    def tensors(self, prefix: str, hidden: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of a layer's weights."""
        return {
            prefix + "q_proj.weight": (self.heads * self.size, hidden),
            prefix + "k_proj.weight": (self.size, hidden),
            prefix + "w_proj.weight": (self.heads, hidden),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """What the indexer of a layer makes of a batch: which earlier tokens each token wants to read."""

    query: Tensor  # [tokens, heads, size]
    weights: Tensor  # [tokens, heads]
    key: Tensor  # [tokens, size]; to be stored, for the tokens after them

    def choose(self, tokens: Tensor | slice, keys: Tensor, visible: Tensor, top_k: int) -> Tensor:
        """bool [n, width]: the best of what these tokens of the batch see. keys [n or 1, width, size]."""
        query, weights = self.query[tokens], self.weights[tokens]
        scores = torch.einsum("thd,twd->thw", query, keys.expand(query.shape[0], -1, -1))
        return highest(scores, weights, visible, top_k)


class Indexer:
    """A layer's projections. The rotary part of a vector comes first."""

    def __init__(self, sizes: SparseShape, weights: dict[str, Tensor]) -> None:
        self._sizes = sizes
        self._query, self._key, self._weights = (weights[f"{name}_proj"] for name in "qkw")

    def __call__(self, normed: Tensor, turn: Turn) -> Pick:
        """Of the normed input [tokens, hidden]."""
        query = functional.linear(normed, self._query).view(-1, self._sizes.heads, self._sizes.size)
        key = functional.linear(normed, self._key)[:, None]
        return Pick(
            query=_turned(query, turn),
            weights=functional.linear(normed, self._weights),
            key=_turned(key, turn)[:, 0],
        )


def _turned(vectors: Tensor, turn: Turn) -> Tensor:
    rope = turn[0].shape[-1]
    return torch.cat([rotate(vectors[..., :rope], turn), vectors[..., rope:]], dim=-1)
