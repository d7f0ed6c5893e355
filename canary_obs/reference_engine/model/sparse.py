"""Sparse attention after DeepSeek-V3.2: an indexer scores earlier tokens, attention reads the best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from canary_obs.reference_engine.model.compression import highest
from canary_obs.reference_engine.model.rotary import Rotation, rotate
from canary_obs.reference_engine.model.shapes import SparseShape


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

    def __call__(self, normed: Tensor, rotation: Rotation) -> Pick:
        """Of the normed input [tokens, hidden]."""
        query = functional.linear(normed, self._query).view(-1, self._sizes.heads, self._sizes.size)
        key = functional.linear(normed, self._key)[:, None]
        return Pick(
            query=_rotated(query, rotation),
            weights=functional.linear(normed, self._weights),
            key=_rotated(key, rotation)[:, 0],
        )


def _rotated(vectors: Tensor, rotation: Rotation) -> Tensor:
    rope = rotation[0].shape[-1]
    return torch.cat([rotate(vectors[..., :rope], rotation), vectors[..., rope:]], dim=-1)
