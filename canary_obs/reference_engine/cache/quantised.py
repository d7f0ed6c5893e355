"""Keys and values in 8 bits, with one scale for each token and head."""

from __future__ import annotations

import torch
from torch import Tensor

from canary_kernels.buffers import KVSource, source_from_tensor
from canary_kernels.layout import Part, Plane

_PARTS = Part.K, Part.V
_SMALLEST_SCALE = 1e-12  # a head of zeros divides by it


def largest(kind: torch.dtype) -> float:
    """The largest magnitude that a storage type holds."""
    return float(torch.finfo(kind).max if kind.is_floating_point else torch.iinfo(kind).max)


def quantised(vectors: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., dim] as `kind`, and the float32 scales [...] that give the vectors back."""
    vectors = vectors.float()
    scales = vectors.abs().amax(-1).clamp_(min=_SMALLEST_SCALE) / largest(kind)
    scaled = vectors / scales[..., None]
    if not kind.is_floating_point:
        scaled = scaled.round_()
    return scaled.to(kind), scales


class QuantisedStore:
    """A LayerStore of float8 or int8 elements; the scales lie in a tensor of their own."""

    def __init__(self, data: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.data = data  # float8_e4m3fn or int8 [2, num_slots, kv_heads, head_dim]; axis 0: K, V
        self.scales = scales  # float32 [2, num_slots, kv_heads]
        self._bytes = data.view(torch.uint8)  # index_copy_ and indexing know no float8
        self._dtype = dtype

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [n, kv_heads, head_dim] in slots int64 [n]."""
        for part, vectors in enumerate((key, value)):
            elements, scales = quantised(vectors, self.data.dtype)
            self._bytes[part].index_copy_(0, slots, elements.view(torch.uint8))
            self.scales[part].index_copy_(0, slots, scales)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, kv_heads, head_dim] of slots int64 [n]."""
        return self._read(0, slots), self._read(1, slots)

    def tensors(self) -> tuple[Tensor, ...]:
        """K, V, and the scales of each."""
        return self.data[0], self.data[1], self.scales[0], self.scales[1]

    def sources(self, layer: int) -> tuple[KVSource, ...]:
        """K and V of every slot, and their scales: a wrong scale is a wrong number."""
        found = [source_from_tensor(self.data[index], part, layer) for index, part in enumerate(_PARTS)]
        found += [
            source_from_tensor(self.scales[index][..., None], part, layer, plane=Plane.SCALES)
            for index, part in enumerate(_PARTS)
        ]
        return tuple(found)

    def _read(self, part: int, slots: Tensor) -> Tensor:
        elements = self._bytes[part].index_select(0, slots).view(self.data.dtype)
        scales = self.scales[part].index_select(0, slots)
        return (elements.float() * scales[..., None]).to(self._dtype)
