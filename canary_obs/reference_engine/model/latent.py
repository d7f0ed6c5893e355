"""Multi-head latent attention: the cache holds one latent row per token; keys and values are made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as functional
from torch import Tensor

from canary_kernels.buffers import KVSource, source_from_tensor
from canary_kernels.layout import Part
from canary_obs.reference_engine.model.rotary import Rotation, rotate

if TYPE_CHECKING:
    from canary_obs.reference_engine.model.attention import Attend
    from canary_obs.reference_engine.model.shapes import LatentShape, ModelShape
    from canary_obs.reference_engine.model.sparse import Indexer


class LatentAttention:
    """One layer, with the up-projections absorbed: to the cache it is one key head of `row` elements."""

    def __init__(
        self,
        shape: ModelShape,
        sizes: LatentShape,
        weights: dict[str, Tensor],
        indexer: Indexer | None = None,
    ) -> None:
        self._shape, self._sizes, self._indexer = shape, sizes, indexer
        self._query, self._down = weights["q_proj"], weights["kv_a_proj_with_mqa"]
        self._norm, self._output = weights["kv_a_layernorm"], weights["o_proj"]
        up = weights["kv_b_proj"].view(shape.heads, 2, shape.head_dim, sizes.rank)
        self._up_key, self._up_value = up[:, 0], up[:, 1]  # [heads, head_dim, rank]
        # Attention divides by the square root of the row; the model means the size of a head's key.
        self._scale = (sizes.row / (shape.head_dim + sizes.rope)) ** 0.5

    def __call__(self, layer: int, normed: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[tokens, hidden] of the normed input [tokens, hidden]."""
        shape, sizes = self._shape, self._sizes
        query = functional.linear(normed, self._query).view(-1, shape.heads, shape.head_dim + sizes.rope)
        plain, rotary_part = query[..., : shape.head_dim], query[..., shape.head_dim :]
        asked = torch.einsum("thd,hdr->thr", plain, self._up_key)
        row = functional.linear(normed, self._down)
        latent, shared = row[:, : sizes.rank], row[:, sizes.rank :]
        latent = functional.rms_norm(latent, (sizes.rank,), self._norm, shape.norm_eps)
        key = torch.cat([latent[:, None], rotate(shared[:, None], rotation)], dim=-1)
        wanted = torch.cat([asked, rotate(rotary_part, rotation)], dim=-1) * self._scale
        pick = None if self._indexer is None else self._indexer(normed, rotation)
        mixed = attend(layer, wanted, key, latent[:, None], pick).view(-1, shape.heads, sizes.rank)
        values = torch.einsum("thr,hdr->thd", mixed, self._up_value)
        return functional.linear(values.flatten(1), self._output)


class LatentStore:
    """A LayerStore of latent rows: the key is the row, the value its first `rank` elements."""

    def __init__(self, rows: Tensor, rank: int) -> None:
        self.rows, self._rank = rows, rank  # [num_slots, 1, row]

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key [n, 1, row] in slots int64 [n]; the value is part of it."""
        del value
        self.rows.index_copy_(0, slots, key)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [n, 1, row] and values [n, 1, rank] of slots int64 [n]."""
        rows = self.rows.index_select(0, slots)
        return rows, rows[..., : self._rank]

    def tensors(self) -> tuple[Tensor, ...]:
        """The rows."""
        return (self.rows,)

    def sources(self, layer: int) -> tuple[KVSource, ...]:
        """The rows, as K; there is no V."""
        return (source_from_tensor(self.rows, Part.K, layer),)
