"""Rotary positions, in Hugging Face's layout."""

from __future__ import annotations

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]  # cosine and sine [tokens, 1, dim]


class Rotary:
    """Angles of every position, computed once."""

    def __init__(self, dim: int, theta: float, max_context: int, like: Tensor) -> None:
        steps = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        angles = torch.arange(max_context, dtype=torch.float64)[:, None] * theta**-steps
        cosine, sine = angles.cos(), angles.sin()
        # Element i pairs with i + dim / 2; the minus of the rotation lives in the sine.
        self._cosine = torch.cat([cosine, cosine], dim=-1).to(like)
        self._sine = torch.cat([-sine, sine], dim=-1).to(like)

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of each position, int64 [tokens]."""
        return self._cosine[positions].unsqueeze(1), self._sine[positions].unsqueeze(1)


def rotate(vectors: Tensor, rotation: Rotation) -> Tensor:
    """vectors [tokens, heads, dim], rotary_part."""
    cosine, sine = rotation
    middle = vectors.shape[-1] // 2
    swapped = torch.cat([vectors[..., middle:], vectors[..., :middle]], dim=-1)
    return torch.addcmul(vectors * cosine, swapped, sine)
