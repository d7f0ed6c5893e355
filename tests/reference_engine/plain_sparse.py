"""An independent indexer: whole sequence, no cache, float64, one token after another."""

from __future__ import annotations

import torch
from torch import Tensor

from canary_obs.reference_engine.model.shapes import SparseShape
from tests.reference_engine.plain_compression import rounded, turned


def chosen_positions(
    sizes: SparseShape, layer: int, weights: dict[str, Tensor], normed: Tensor, rope: int
) -> list[list[int]]:
    """Positions that each token attends to; weights float64 by name, normed [tokens, hidden]."""
    prefix = f"model.layers.{layer}.indexer."
    query, key, gate = (weights[f"{prefix}{name}_proj.weight"] for name in "qkw")
    keys = [rounded(_placed(key @ vector, position, rope)) for position, vector in enumerate(normed)]
    chosen = []
    for position, vector in enumerate(normed):
        total = torch.zeros(position + 1, dtype=torch.float64)
        for head, weight in enumerate(gate @ vector):
            asked = _placed((query @ vector).view(sizes.heads, -1)[head], position, rope)
            scores = torch.stack([asked @ one for one in keys[: position + 1]])
            total += weight * scores * scores.sigmoid()
        chosen.append(total.topk(min(sizes.top_k, position + 1)).indices.tolist())
    return chosen


def _placed(vector: Tensor, position: int, rope: int) -> Tensor:
    return torch.cat([turned(vector[:rope], position), vector[rope:]])
