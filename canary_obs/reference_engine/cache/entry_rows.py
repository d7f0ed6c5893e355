"""Pages of compressed entries and index keys, in the byte layouts of DeepSeek's caches."""

from __future__ import annotations

import torch
from torch import Tensor

from canary_kernels.buffers import KVSource, source_from_tensor
from canary_kernels.layout import Part, Plane
from canary_obs.reference_engine.cache.quantised import largest, quantised

_FP8 = torch.float8_e4m3fn
_BLOCK = 64  # elements that share a scale
_SCALE_BYTES = 8  # of a row; what its blocks leave over is zero
_BIAS = 127  # of an exponent that is stored as a byte
_PAGE_ALIGNMENT = 64
_INDEX_SCALE_BYTES = 4


class EntryRows:
    """Entries of several layers: rows of fp8 elements, a bfloat16 rotary part, one scale per 64 elements.

    448 + 64 elements make 584 bytes. Pages are padded, so that a page's stride is no multiple of the row.
    """

    def __init__(self, layers: int, pages: int, per_page: int, sizes: tuple[int, int], device: str) -> None:
        self._rank, rope = sizes
        self.row_bytes = self._rank + 2 * rope + _SCALE_BYTES
        memory = torch.zeros(
            (layers, pages, _padded(per_page * self.row_bytes)), dtype=torch.uint8, device=device
        )
        used = memory[:, :, : per_page * self.row_bytes]
        self.rows = used.view(layers, pages, per_page, 1, self.row_bytes)
        self._per_page = per_page

    def write(self, layer: int, slots: Tensor, entries: Tensor) -> None:
        """Store entries [n, rank + rope] in slots int64 [n]."""
        blocks = entries[:, : self._rank].float().view(entries.shape[0], -1, _BLOCK)
        exponents = (blocks.abs().amax(-1) / largest(_FP8)).clamp_(min=2.0**-100).log2().ceil()
        elements = (blocks * (-exponents).exp2()[..., None]).to(_FP8).view(torch.uint8).flatten(1)
        rope = entries[:, self._rank :].to(torch.bfloat16).contiguous().view(torch.uint8)
        scales = (exponents + _BIAS).to(torch.uint8)
        spare = scales.new_zeros((scales.shape[0], _SCALE_BYTES - scales.shape[1]))
        rows = torch.cat([elements, rope, scales, spare], dim=1)
        self.rows[layer, slots // self._per_page, slots % self._per_page, 0] = rows

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """float32 [n, rank + rope] of slots int64 [n]."""
        rows = self.rows[layer, slots // self._per_page, slots % self._per_page, 0]
        rope_end = self.row_bytes - _SCALE_BYTES
        blocks = rows[:, : self._rank].contiguous().view(_FP8).float().view(rows.shape[0], -1, _BLOCK)
        exponents = rows[:, rope_end : rope_end + blocks.shape[1]].float() - _BIAS
        rope = rows[:, self._rank : rope_end].contiguous().view(torch.bfloat16).float()
        return torch.cat([(blocks * exponents.exp2()[..., None]).flatten(1), rope], dim=1)

    def sources(self, layer: int, number: int) -> tuple[KVSource, ...]:
        """The rows of the global layer `number`, held here as `layer`."""
        return (source_from_tensor(self.rows[layer], Part.K, number),)


class IndexRows:
    """Index keys of several layers: in each page first the fp8 keys of all its entries, then their scales."""

    def __init__(self, layers: int, pages: int, per_page: int, size: int, device: str) -> None:
        keys, end = per_page * size, per_page * (size + _INDEX_SCALE_BYTES)
        memory = torch.zeros((layers, pages, _padded(end)), dtype=torch.uint8, device=device)
        self.keys = memory[:, :, :keys].view(layers, pages, per_page, 1, size)
        scales = memory.view(torch.float32)[:, :, keys // 4 : end // 4]
        self.scales = scales.view(layers, pages, per_page, 1, 1)
        self._per_page = per_page

    def write(self, layer: int, slots: Tensor, keys: Tensor) -> None:
        """Store keys [n, size] in slots int64 [n]."""
        elements, scales = quantised(keys, _FP8)
        pages, places = slots // self._per_page, slots % self._per_page
        self.keys[layer, pages, places, 0] = elements.view(torch.uint8)
        self.scales[layer, pages, places, 0, 0] = scales

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """float32 [n, size] of slots int64 [n]."""
        pages, places = slots // self._per_page, slots % self._per_page
        elements = self.keys[layer, pages, places, 0].view(_FP8).float()
        scales: Tensor = self.scales[layer, pages, places, 0]
        return elements * scales

    def tensors(self, layer: int) -> tuple[Tensor, ...]:
        """Keys and scales of a layer: [pages, per_page, ...]."""
        return self.keys[layer], self.scales[layer]

    def sources(self, layer: int, number: int) -> tuple[KVSource, ...]:
        """Keys and scales of the global layer `number`, held here as `layer`."""
        return (
            source_from_tensor(self.keys[layer], Part.K, number),
            source_from_tensor(self.scales[layer], Part.K, number, plane=Plane.SCALES),
        )


class StateRows:
    """States of several layers: float32, one row per token of a run that is not complete."""

    def __init__(self, layers: int, num_slots: int, size: int, device: str) -> None:
        self.rows = torch.zeros((layers, num_slots, 1, size), device=device)

    def write(self, layer: int, slots: Tensor, states: Tensor) -> None:
        """Store states [n, size] in slots int64 [n]."""
        self.rows[layer, :, 0].index_copy_(0, slots, states.float())

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """float32 [n, size] of slots int64 [n]."""
        return self.rows[layer, :, 0].index_select(0, slots)

    def sources(self, layer: int, number: int) -> tuple[KVSource, ...]:
        """The rows of the global layer `number`, held here as `layer`."""
        return (source_from_tensor(self.rows[layer], Part.K, number),)


def _padded(size: int) -> int:
    """Bytes of a page, with a gap behind what it holds."""
    return (size // _PAGE_ALIGNMENT + 1) * _PAGE_ALIGNMENT
