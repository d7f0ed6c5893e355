"""KV pools in the layouts engines use, with a way to read a slot's bytes that knows nothing of addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from canary_kernels.buffers import KVSource, source_from_tensor
from canary_kernels.layout import Part, Plane

SLOTS = 32
PAGE = 4


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Sources and, by (part, layer), tensors [slots, heads, bytes] that view the same memory."""

    sources: list[KVSource]
    bytes: dict[tuple[Part, int], Tensor]  # uint8 views
    scales: dict[tuple[Part, int], Tensor] = field(default_factory=dict)  # likewise, of the plane SCALES


def _noise(shape: tuple[int, ...], device: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device)


def _pool(tensors: dict[tuple[Part, int], Tensor], dtype: torch.dtype) -> Pool:
    """From uint8 tensors [pages, page, heads, bytes] or [slots, heads, bytes]."""
    sources = [source_from_tensor(t.view(dtype), part, layer) for (part, layer), t in tensors.items()]
    flat = {key: t if t.dim() == 3 else t.flatten(0, 1) for key, t in tensors.items() if t.dim() == 3}
    paged = {key: _PagedBytes(t) for key, t in tensors.items() if t.dim() == 4}
    return Pool(sources=sources, bytes={**flat, **paged})


class _PagedBytes:
    """Indexing [pages, page, heads, bytes] by slot, in place; a page may be [tiles, tile]."""

    def __init__(self, tensor: Tensor, *, tiled: bool = False) -> None:
        self.tensor = tensor if tiled else tensor.unsqueeze(1)

    def __getitem__(self, slot: int) -> Tensor:
        _, tiles, tile = self.tensor.shape[:3]
        return self.tensor[slot // (tiles * tile), slot // tile % tiles, slot % tile]


def separate(device: str) -> Pool:
    """One tensor per layer and part, [slots, heads, dim] of bfloat16."""
    return _pool(
        {(part, layer): _noise((SLOTS, 2, 24), device) for layer in range(3) for part in (Part.K, Part.V)},
        torch.bfloat16,
    )


def together(device: str) -> Pool:
    """One tensor for all layers, [layers, 2, slots, heads, dim] of float32."""
    memory = _noise((3, 2, SLOTS, 2, 16), device)
    return _pool(
        {(part, layer): memory[layer, part - 1] for layer in range(3) for part in (Part.K, Part.V)},
        torch.float32,
    )


def interleaved(device: str) -> Pool:
    """K and V side by side, [slots, 2, heads, dim] per layer; layers 5 and 6 of a pipeline stage."""
    memory = [_noise((SLOTS, 2, 2, 16), device) for _ in range(2)]
    return _pool(
        {(part, 5 + i): memory[i][:, part - 1] for i in range(2) for part in (Part.K, Part.V)}, torch.bfloat16
    )


def heads_first(device: str) -> Pool:
    """Pages of [heads, page, dim] (HND)."""
    memory = _noise((2, 2, SLOTS // PAGE, 3, PAGE, 16), device).transpose(3, 4)
    return _pool(
        {(part, layer): memory[layer, part - 1] for layer in range(2) for part in (Part.K, Part.V)},
        torch.float16,
    )


def padded_pages(device: str) -> Pool:
    """Pages with a gap after each, of one byte per element (fp8)."""
    memory = _noise((2, SLOTS // PAGE, PAGE * 24 + 8), device)[:, :, : PAGE * 24].unflatten(2, (PAGE, 3, 8))
    return _pool({(part, 0): memory[part - 1] for part in (Part.K, Part.V)}, torch.uint8)


def latent(device: str) -> Pool:
    """Rows of 584 bytes, K only (a compressed pool with its scales)."""
    return _pool({(Part.K, layer): _noise((SLOTS, 1, 584), device) for layer in range(2)}, torch.uint8)


def odd_bytes(device: str) -> Pool:
    """Rows of 6 and of 7 bytes, at odd addresses."""
    short = _noise((1 + SLOTS * 6,), device)[1:].view(SLOTS, 1, 6)
    return _pool({(Part.K, 0): short, (Part.V, 0): _noise((SLOTS, 1, 7), device)}, torch.uint8)


def odd_heads(device: str) -> Pool:
    """Heads of 6 bytes: words straddle heads."""
    memory = _noise((SLOTS, 5, 3, 6), device)[:, :3]
    return _pool({(Part.K, layer): memory[:, layer] for layer in range(3)}, torch.uint8)


def wide_rows(device: str) -> Pool:
    """More words per row than a kernel's block."""
    return _pool({(part, 0): _noise((SLOTS, 9, 512), device) for part in (Part.K, Part.V)}, torch.bfloat16)


def unequal(device: str) -> Pool:
    """K and V of different widths: two geometries."""
    tensors = {(Part.K, layer): _noise((SLOTS, 2, 24), device) for layer in range(2)}
    tensors |= {(Part.V, layer): _noise((SLOTS, 2, 16), device) for layer in range(2)}
    return _pool(tensors, torch.bfloat16)


def long(device: str) -> Pool:
    """A slot's rows of thousands of words, as of states: of K and of V others, and neither whole blocks."""
    sizes = {Part.K: 17_000, Part.V: 20_488}
    return _pool(
        {(part, layer): _noise((SLOTS, 1, sizes[part]), device) for layer in range(2) for part in sizes},
        torch.float32,
    )


def deep(device: str) -> Pool:
    """So many layers that programs share a slot; V of some is wider than the rest."""
    tensors = {
        (part, layer): _noise((SLOTS, 2, 24), device) for part in (Part.K, Part.V) for layer in range(9)
    }
    tensors |= {(Part.V, layer): _noise((SLOTS, 2, 32), device) for layer in range(9, 13)}
    return _pool(tensors, torch.bfloat16)


def split_elements(device: str) -> Pool:
    """Runs of a head's elements spread over the page, [pages, heads, dim / x, page, x]."""
    memory = _noise((2, SLOTS // PAGE, 2, 3, PAGE, 16), device)
    sources, views = [], {}
    for layer in range(2):
        sources.append(
            KVSource(
                tensor=memory[layer], part=Part.K, layer=layer, head_start=0, num_heads=2, head_bytes=48,
                page_size=PAGE, page_stride=2 * 3 * PAGE * 16, slot_stride=16, head_stride=3 * PAGE * 16,
                element_bytes=16, element_stride=PAGE * 16,
            )
        )  # fmt: skip
        views[Part.K, layer] = _PagedBytes(memory[layer].permute(0, 3, 1, 2, 4))
    return Pool(sources=sources, bytes=views)


def tiled(device: str) -> Pool:
    """Pages of 8 slots, heads of 64 two-byte elements as vLLM tiles them for the matrix unit of a CPU.

    K: [tiles of 4 slots, element pairs, slots, pair]; V: [bands of 16 elements, slot pairs, elements, pair].
    """
    size, head = 8, 8 * 64 * 2
    memory = _noise((2, SLOTS // size, 2, 2, head), device)
    keys = memory[:, :, :, 0].unflatten(-1, (size // 4, 32, 4, 4))
    values = memory[:, :, :, 1].unflatten(-1, (4, size // 2, 16, 2, 2))
    whole: dict[str, Any] = {
        "num_heads": 2, "head_start": 0, "head_bytes": 128, "head_stride": 2 * head,
        "page_size": size, "page_stride": 4 * head,
    }  # fmt: skip
    k_tiles = {"tile_size": 4, "tile_stride": 512, "slot_stride": 4, "element_bytes": 4, "element_stride": 16}
    v_tiles = {"tile_size": 2, "tile_stride": 64, "slot_stride": 2, "element_bytes": 2, "element_stride": 4}
    v_tiles |= {"band_bytes": 32, "band_stride": 64 * size // 2}
    sources: list[KVSource] = []
    views: dict[tuple[Part, int], Any] = {}
    for layer in range(2):
        sources.append(KVSource(tensor=keys[layer], part=Part.K, layer=layer, **whole, **k_tiles))
        sources.append(KVSource(tensor=values[layer], part=Part.V, layer=layer, **whole, **v_tiles))
        views[Part.K, layer] = _PagedBytes(keys[layer].permute(0, 2, 4, 1, 3, 5), tiled=True)
        views[Part.V, layer] = _PagedBytes(values[layer].permute(0, 3, 5, 1, 2, 4, 6), tiled=True)
    return Pool(sources=sources, bytes=views)


def inline_scales(device: str) -> Pool:
    """Heads of 256 data bytes, a float32 scale and 4 spare bytes (vLLM's fp8 per token and head)."""
    keys = [(part, layer) for layer in range(2) for part in (Part.K, Part.V)]
    return _pool({key: _noise((SLOTS, 2, 264), device) for key in keys}, torch.uint8)


def separate_scales(device: str) -> Pool:
    """fp8 data [slots, heads, dim] and float32 scales [slots, heads], two tensors per layer and part."""
    data = {(part, layer): _noise((SLOTS, 3, 24), device) for layer in range(2) for part in (Part.K, Part.V)}
    scales = {key: _noise((2 * SLOTS, 3, 4), device)[::2] for key in data}
    return _with_scales(data, scales)


def page_scales(device: str) -> Pool:
    """Padded pages of [page, 1, 24] data bytes followed by [page, 1, 4] scale bytes, K only (an indexer)."""
    memory = _noise((3, SLOTS // PAGE, PAGE * 28 + 16), device)
    ends = PAGE * 24, PAGE * 28
    data = {(Part.K, layer): memory[layer, :, : ends[0]].unflatten(1, (PAGE, 1, 24)) for layer in range(3)}
    beside = memory[:, :, ends[0] : ends[1]].unflatten(2, (PAGE, 1, 4))
    return _with_scales(data, {(Part.K, layer): beside[layer] for layer in range(3)})


def _with_scales(data: dict[tuple[Part, int], Tensor], scales: dict[tuple[Part, int], Tensor]) -> Pool:
    pool, beside = _pool(data, torch.uint8), _pool(scales, torch.uint8)
    marked = [replace(source, plane=Plane.SCALES) for source in beside.sources]
    return Pool(sources=pool.sources + marked, bytes=pool.bytes, scales=beside.bytes)


SCALED: list[Callable[[str], Pool]] = [separate_scales, page_scales]
LAYOUTS: list[Callable[[str], Pool]] = [
    separate, together, interleaved, heads_first, padded_pages, latent, odd_bytes, odd_heads, wide_rows,
    unequal, split_elements, tiled, inline_scales,
]  # fmt: skip
