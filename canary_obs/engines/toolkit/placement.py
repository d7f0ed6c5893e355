"""Where a layer's bytes lie, found by writing through the backend's own KV write and looking."""

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

# Written as bfloat16, float16, float32 or fp8, these two differ in every byte.
_LOW, _HIGH = 1.0, -3.1415927


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWrite:
    """One layer's cache and the backend's own way to write tokens into it."""

    name: str
    cache: Tensor  # [pages, ...]; the last axis contiguous
    page_size: int  # slots per page of `cache`
    shapes: dict[Part, tuple[int, int]]  # heads, elements per head
    dtype: torch.dtype  # of what the model writes, before quantisation
    write: Callable[[dict[Part, Tensor], Tensor], None]  # parts [n, heads, elements], slots int64 [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The affine map of one part: bytes from the cache's first byte, named as in KVSource."""

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
        """int64 [heads, head_bytes]: predicted offsets of a slot's bytes."""
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
        """The same as the kernels take it."""
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
    """One placement per part. Raises UnsupportedEngine when the bytes seen fit no affine map.

    likely: what another layer was found to be; taken when this one's bytes follow it, else found anew.
    Writes into the first pages and puts their bytes back; nothing else may use the cache meanwhile.
    """
    probe = _Probe(layer)
    saved = probe.pages.clone()
    try:
        if likely and _follow(layer, likely, probe):
            return likely
        return tuple(_fit(layer, part, probe) for part in layer.shapes)
    finally:
        probe.pages.copy_(saved)


class _Probe:
    """The first pages as bytes, with the offset of each."""

    def __init__(self, layer: LayerWrite) -> None:
        self._layer = layer
        cache = layer.cache
        if cache.dim() < 2 or cache.stride(-1) != 1 or cache.shape[0] < 2:
            raise _unexplained(layer, f"shape {tuple(cache.shape)} with strides {cache.stride()}")
        num_pages = min(3, cache.shape[0])
        self.pages = cache.view(torch.uint8)[:num_pages]
        offsets = np.zeros((), dtype=np.int64)
        for size, stride in zip(self.pages.shape, self.pages.stride(), strict=True):
            offsets = offsets[..., None] + np.arange(size) * stride
        self.offsets: NDArray[np.int64] = offsets.reshape(-1)
        size = layer.page_size
        last = (num_pages - 1) * size
        # A tile's size shows in the first power of two beyond it; the other slots confirm.
        within = {1 << bit for bit in range(size.bit_length())} | {0, 3, size - 1}
        self.slots = sorted({slot for slot in within if slot < size} | {last, last + size - 1})

    def image(self, part: Part, values: Tensor, slots: list[int]) -> NDArray[np.uint8]:
        """uint8 [bytes]: the pages after a part's `values`, [heads, elements] or per slot, were written."""
        layer, device = self._layer, self._layer.cache.device
        parts = {}
        for other, shape in layer.shapes.items():
            content = values if other is part else torch.full(shape, _LOW)
            parts[other] = content.to(device, layer.dtype).expand(len(slots), *shape).contiguous()
        layer.write(parts, torch.tensor(slots, dtype=torch.int64, device=device))
        # What follows is NumPy's: torch shares such little work among all cores, and where those are busy,
        # as engines keep them, it waits for each of them, a thousand times at every attach.
        return self.pages.flatten().to("cpu", copy=True).numpy()


def _follow(layer: LayerWrite, likely: tuple[Placement, ...], probe: _Probe) -> bool:
    """Whether a random half of the elements, another one in each slot, changes just the bytes it should."""
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
    seen: dict[int, Tensor] = {}
    for slot in probe.slots:
        changed = np.flatnonzero(probe.image(part, high, [slot]) != base)
        probe.image(part, low, [slot])
        width, rest = divmod(changed.size, heads * elements)
        order = np.argsort(owner[changed] * probe.offsets.size + changed)
        sized = np.bincount(owner[changed], minlength=heads * elements)
        if rest or not width or not bool((sized == width).all()):
            raise _unexplained(
                layer, f"{changed.size} bytes of slot {slot} carry {heads}x{elements} {part.name} elements"
            )
        seen[slot] = torch.from_numpy(probe.offsets[changed[order]]).view(heads, elements * width)
    placement = _affine(part, layer.page_size, seen)
    for slot, offsets in seen.items():
        if not torch.equal(placement.offset(slot), offsets):
            raise _unexplained(layer, f"the {part.name} bytes of slot {slot} follow no affine map")
    return placement


def _affine(part: Part, page_size: int, seen: dict[int, Tensor]) -> Placement:
    """The only map that the first slots allow; the others must confirm it."""
    first = seen[0]
    heads, head_bytes = first.shape
    row = first[0] - first[0, 0]
    breaks = (row.diff() != 1).nonzero()
    run = int(breaks[0]) + 1 if breaks.numel() else head_bytes
    run = run if head_bytes % run == 0 else 1
    elements, slots = row[::run], sorted(slot for slot in seen if slot < page_size)
    band, band_stride = _even(torch.arange(len(elements)), elements, len(elements))
    starts = torch.stack([seen[slot][0, 0] for slot in slots])
    tile, tile_stride = _even(torch.tensor(slots), starts, page_size)
    pages = max(seen) // page_size
    return Placement(
        part=part,
        first=int(first[0, 0]),
        num_heads=heads,
        head_bytes=head_bytes,
        page_size=page_size,
        page_stride=int(seen[pages * page_size][0, 0] - first[0, 0]) // pages,
        tile_size=tile,
        tile_stride=tile_stride,
        slot_stride=int(seen[1][0, 0] - first[0, 0]) if page_size > 1 else head_bytes,
        head_stride=int(first[1, 0] - first[0, 0]) if heads > 1 else head_bytes,
        band_bytes=band * run,
        band_stride=band_stride,
        element_bytes=run,
        element_stride=int(row[run]) if run < head_bytes else run,
    )


def _even(numbers: Tensor, places: Tensor, total: int) -> tuple[int, int]:
    """How many lie as the first two do, and how far away the next one lies; total and 0 when all do."""
    away = places - places[0]
    uneven = (away != numbers * away[min(1, len(away) - 1)]).nonzero()
    if not uneven.numel() or total % int(numbers[uneven[0]]):
        return total, 0
    return int(numbers[uneven[0]]), int(away[uneven[0]])


def _unexplained(layer: LayerWrite, found: str) -> UnsupportedEngine:
    return UnsupportedEngine(
        f"the KV layout of {layer.name} cannot be explained: {found}. The bytes of its group cannot be "
        "checked; use another attention backend or KV cache dtype, or report this layout"
    )
