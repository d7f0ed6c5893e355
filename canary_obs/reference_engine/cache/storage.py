"""How one layer's keys and values lie in memory, and where the canary finds their bytes."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from canary_kernels.buffers import KVSource, source_from_tensor
from canary_kernels.layout import Part
from canary_obs.reference_engine.cache.quantised import QuantisedStore
from canary_obs.reference_engine.model.latent import LatentStore
from canary_obs.reference_engine.model.shapes import ModelShape
from canary_obs.reference_engine.settings import EngineConfig, KVFormat

_STORED_AS = {KVFormat.FP8: torch.float8_e4m3fn, KVFormat.INT8: torch.int8}


class LayerStore(Protocol):
    """Keys and values of one layer, by slot."""

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [n, kv_heads, head_dim] in slots int64 [n]."""

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, kv_heads, head_dim] of slots int64 [n]."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything held, slots on the first axis: what a copy of a slot takes along."""

    def sources(self, layer: int) -> tuple[KVSource, ...]:
        """Every byte that `read` depends on, as sources of this global layer."""


class PlainStore:
    """Keys and values as they are, in the model's own type."""

    def __init__(self, kv: Tensor) -> None:
        self.kv = kv  # [2, num_slots, kv_heads, head_dim]; axis 0: K, V

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [n, kv_heads, head_dim] in slots int64 [n]."""
        self.kv[0].index_copy_(0, slots, key)
        self.kv[1].index_copy_(0, slots, value)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, kv_heads, head_dim] of slots int64 [n]."""
        # Rows of a matrix: the embedding kernel copies them several times faster than general indexing.
        shape = (slots.numel(), *self.kv.shape[2:])
        key, value = self.kv.flatten(2)
        return functional.embedding(slots, key).view(shape), functional.embedding(slots, value).view(shape)

    def tensors(self) -> tuple[Tensor, ...]:
        """K and V, slots on the first axis."""
        return self.kv[0], self.kv[1]

    def sources(self, layer: int) -> tuple[KVSource, ...]:
        """K and V of every slot."""
        return (
            source_from_tensor(self.kv[0], Part.K, layer),
            source_from_tensor(self.kv[1], Part.V, layer),
        )


def stored_plainly(shape: ModelShape, config: EngineConfig) -> bool:
    """Whether keys and values are stored as they are."""
    return shape.latent is None and config.kv_format is KVFormat.PLAIN


def packed_stores(
    shape: ModelShape, config: EngineConfig, layers: int, num_slots: int
) -> tuple[LayerStore, ...]:
    """Zeroed stores of this many layers, in the format of a model or settings that are not plain."""
    device = torch.device(config.device)
    if shape.latent is not None:
        rows = torch.zeros((layers, num_slots, 1, shape.latent.row), dtype=config.dtype, device=device)
        return tuple(LatentStore(layer, shape.latent.rank) for layer in rows)
    kind = _STORED_AS[config.kv_format]
    size = (layers, 2, num_slots, shape.kv_heads, shape.head_dim)  # axis 1: K, V
    data = torch.zeros(size, dtype=torch.uint8, device=device).view(kind)
    scales = torch.zeros(size[:-1], device=device)
    return tuple(QuantisedStore(d, s, config.dtype) for d, s in zip(data, scales, strict=True))
