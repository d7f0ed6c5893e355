"""Detects where a layer stores the bytes of a slot, by writing through its attention backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_kernels.buffers import KVSource
from canary_kernels.layout import Part
from canary_obs.errors import UnsupportedEngine

# As bfloat16, float16, float32 and fp8 these two values differ in every byte.
_LOW, _HIGH = 1.0, -3.1415927


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWrite:
    """One layer's KV cache and its attention backend's KV write."""

    name: str
    cache: Tensor  # [pages, ...]; the last axis contiguous
    page_size: int  # slots per page of `cache`
    shapes: dict[Part, tuple[int, int]]  # heads, elements per head
    dtype: torch.dtype  # of the K and V passed to `write`, before quantisation
    write: Callable[[dict[Part, Tensor], Tensor], None]  # parts [n, heads, elements], slots int64 [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Affine map from slots to bytes of one part, from the cache's first byte; fields as in KVSource."""

    part: Part
    first: int
    num_heads: int
    head_bytes: int
    page_size: int
    page_stride: int
    tile_size: int
    tile_stride: int
    slot_stride: int
    head_stride: int
    band_bytes: int
    band_stride: int
    element_bytes: int
    element_stride: int

    def offset(self, slot: int) -> Tensor:
        """int64 [heads, head_bytes]: offset of each byte of a slot."""
        byte = torch.arange(self.head_bytes)
        of_band = byte % self.band_bytes
        within = of_band // self.element_bytes * self.element_stride + of_band % self.element_bytes
        within += byte // self.band_bytes * self.band_stride
        heads = torch.arange(self.num_heads) * self.head_stride
        of_page = slot % self.page_size
        start = self.first + slot // self.page_size * self.page_stride
        start += of_page // self.tile_size * self.tile_stride + of_page % self.tile_size * self.slot_stride
        return heads[:, None] + within + start

    def source(self, cache: Tensor, layer: int, head_start: int) -> KVSource:
        """The map as kernels take it; `head_start` is the global number of the first head."""
        storage = cache.untyped_storage()
        start = cache.data_ptr() - storage.data_ptr() + self.first
        base = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage, start, (1,), (1,))
        return KVSource(
            tensor=base, part=self.part, layer=layer, head_start=head_start, num_heads=self.num_heads,
            head_bytes=self.head_bytes, page_size=self.page_size, page_stride=self.page_stride,
            tile_size=self.tile_size, tile_stride=self.tile_stride, slot_stride=self.slot_stride,
            head_stride=self.head_stride, band_bytes=self.band_bytes, band_stride=self.band_stride,
            element_bytes=self.element_bytes, element_stride=self.element_stride,
        )  # fmt: skip


def find_placements(layer: LayerWrite, likely: tuple[Placement, ...] = ()) -> tuple[Placement, ...]:
    """One placement per part. Raises UnsupportedEngine when no affine map explains the layout.

    `likely`: the placements of a similar layer; returned when a few writes confirm them, which is faster.
    Writes into the first pages and restores them; nothing else may use the cache meanwhile.
    """
    probe = _Probe(layer)
    saved = probe.pages.clone()
    try:
        if likely and _confirm(layer, likely, probe):
            return likely
        return tuple(_fit(layer, part, probe) for part in layer.shapes)
    finally:
        probe.pages.copy_(saved)


class _Probe:
    """The first pages as bytes, with the offset of each byte."""

    def __init__(self, layer: LayerWrite) -> None:
        self._layer = layer
        cache = layer.cache
        if cache.dim() < 2 or cache.stride(-1) != 1 or cache.shape[0] < 2:
            raise _unsupported_layout(layer, f"shape {tuple(cache.shape)} with strides {cache.stride()}")
        num_pages = min(3, cache.shape[0])
        self.pages = cache.view(torch.uint8)[:num_pages]
        offsets = np.zeros((), dtype=np.int64)
        for size, stride in zip(self.pages.shape, self.pages.stride(), strict=True):
            offsets = offsets[..., None] + np.arange(size) * stride
        self.offsets: NDArray[np.int64] = offsets.reshape(-1)
        size = layer.page_size
        last = (num_pages - 1) * size
        # The first power of two beyond a tile shows the tile's size; the other slots confirm the map.
        within = {1 << bit for bit in range(size.bit_length())} | {0, 3, size - 1}
        self.slots = sorted({slot for slot in within if slot < size} | {last, last + size - 1})

    def image(self, part: Part, values: Tensor, slots: list[int]) -> NDArray[np.uint8]:
        """uint8 [bytes]: the pages after writing `values` ([heads, elements], or one per slot) of a part."""
        layer, device = self._layer, self._layer.cache.device
        parts = {}
        for other, shape in layer.shapes.items():
            content = values if other is part else torch.full(shape, _LOW)
            parts[other] = content.to(device, layer.dtype).expand(len(slots), *shape).contiguous()
        layer.write(parts, torch.tensor(slots, dtype=torch.int64, device=device))
        # NumPy from here on: torch splits even this little work among all cores, and waits for each of them
        # when an engine keeps it busy, a thousand times per attach.
        return self.pages.flatten().to("cpu", copy=True).numpy()


def _confirm(layer: LayerWrite, likely: tuple[Placement, ...], probe: _Probe) -> bool:
    """Whether writing a random half of each slot's elements changes exactly the bytes that `likely` names."""
    if tuple(place.part for place in likely) != tuple(layer.shapes):
        return False
    draw = torch.Generator().manual_seed(len(probe.slots))
    for place in likely:
        shape = layer.shapes[place.part]
        if (place.num_heads, place.page_size) != (shape[0], layer.page_size) or place.head_bytes % shape[1]:
            return False
        chosen = torch.rand((len(probe.slots), *shape), generator=draw) < 0.5
        base = probe.image(place.part, torch.full(shape, _LOW), probe.slots)
        seen = probe.image(place.part, torch.where(chosen, _HIGH, _LOW), probe.slots)
        changed = np.sort(probe.offsets[np.flatnonzero(seen != base)])
        bytes_chosen = chosen.repeat_interleave(place.head_bytes // shape[1], -1)
        offsets = torch.stack([place.offset(slot) for slot in probe.slots])
        if not np.array_equal(changed, np.sort(offsets[bytes_chosen].numpy())):
            return False
    return True


def _fit(layer: LayerWrite, part: Part, probe: _Probe) -> Placement:
    heads, elements = layer.shapes[part]
    low, high = torch.full((heads, elements), _LOW), torch.full((heads, elements), _HIGH)
    code = torch.arange(heads * elements).view(heads, elements)
    base = probe.image(part, low, probe.slots)
    owner = np.zeros(base.shape, dtype=np.int64)
    for bit in range((heads * elements - 1).bit_length()):
        coded = torch.where((code >> bit) & 1 == 1, high, low)
        owner |= (probe.image(part, coded, probe.slots) != base).astype(np.int64) << bit
    probe.image(part, low, probe.slots)
    found: dict[int, Tensor] = {}  # byte offsets by slot
    for slot in probe.slots:
        changed = np.flatnonzero(probe.image(part, high, [slot]) != base)
        probe.image(part, low, [slot])
        width, rest = divmod(changed.size, heads * elements)
        order = np.argsort(owner[changed] * probe.offsets.size + changed)
        sized = np.bincount(owner[changed], minlength=heads * elements)
        if rest or not width or not bool((sized == width).all()):
            raise _unsupported_layout(
                layer, f"{changed.size} bytes of slot {slot} carry {heads}x{elements} {part.name} elements"
            )
        found[slot] = torch.from_numpy(probe.offsets[changed[order]]).view(heads, elements * width)
    placement = _affine(part, layer.page_size, found)
    for slot, offsets in found.items():
        if not torch.equal(placement.offset(slot), offsets):
            raise _unsupported_layout(layer, f"the {part.name} bytes of slot {slot} fit no affine map")
    return placement


def _affine(part: Part, page_size: int, found: dict[int, Tensor]) -> Placement:
    """The only affine map that fits the first slots; the caller checks it on the others."""
    first = found[0]
    heads, head_bytes = first.shape
    row = first[0] - first[0, 0]
    breaks = (row.diff() != 1).nonzero()
    run = int(breaks[0]) + 1 if breaks.numel() else head_bytes
    run = run if head_bytes % run == 0 else 1
    elements, slots = row[::run], sorted(slot for slot in found if slot < page_size)
    band, band_stride = _first_run(torch.arange(len(elements)), elements, len(elements))
    starts = torch.stack([found[slot][0, 0] for slot in slots])
    tile, tile_stride = _first_run(torch.tensor(slots), starts, page_size)
    pages = max(found) // page_size
    return Placement(
        part=part,
        first=int(first[0, 0]),
        num_heads=heads,
        head_bytes=head_bytes,
        page_size=page_size,
        page_stride=int(found[pages * page_size][0, 0] - first[0, 0]) // pages,
        tile_size=tile,
        tile_stride=tile_stride,
        slot_stride=int(found[1][0, 0] - first[0, 0]) if page_size > 1 else head_bytes,
        head_stride=int(first[1, 0] - first[0, 0]) if heads > 1 else head_bytes,
        band_bytes=band * run,
        band_stride=band_stride,
        element_bytes=run,
        element_stride=int(row[run]) if run < head_bytes else run,
    )


def _first_run(numbers: Tensor, places: Tensor, total: int) -> tuple[int, int]:
    """Length of the first evenly spaced run, and offset of the next one; (total, 0) when all are even."""
    away = places - places[0]
    uneven = (away != numbers * away[min(1, len(away) - 1)]).nonzero()
    if not uneven.numel() or total % int(numbers[uneven[0]]):
        return total, 0
    return int(numbers[uneven[0]]), int(away[uneven[0]])


def _unsupported_layout(layer: LayerWrite, found: str) -> UnsupportedEngine:
    return UnsupportedEngine(
        f"the KV layout of {layer.name} is not supported: {found}. The bytes of its group cannot be "
        "checked; use another attention backend or KV cache dtype, or report this layout"
    )
