"""SGLang's keys by which an indexer chooses what sparse attention reads (DeepSeek-V3.2, GLM)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from canary_kernels.buffers import KVSource
from canary_obs.engine_api.views import GroupView
from canary_obs.errors import UnsupportedEngine
from canary_obs.kv_locations.split_pages import SplitPages

INDEXER = "indexer"
_SCALE_BYTES = 4


def has_index_keys(pool: Any) -> bool:
    """Whether the pool keeps such keys; some of its layers may share those of the layer before."""
    return hasattr(pool, "index_key_cache")


def index_layers(pool: Any) -> list[int]:
    """Numbers, in the pool, of the layers that have keys of their own."""
    return [index for index, shared in enumerate(pool.skip_topk_layers) if not shared]


def index_view(pool: Any, num_slots: int) -> GroupView:
    """The group of these keys, under the slots of the latent vectors.

    Writes to the first pages and restores them. Raises UnsupportedEngine for a layout.
    """
    if (count := int(pool.index_kpool)) != 1:
        raise UnsupportedEngine(f"each is of {count} tokens: such pooled keys are not covered yet")
    sources: list[KVSource] = []
    for index in index_layers(pool):
        layer = pool.start_layer + index
        # Kernels may have smaller pages than the allocator.
        pages: Tensor = pool.get_index_k_with_scale_buffer(layer)
        sources += index_pages(pages, int(pool.index_page_size), layer, partial(write_key, pool, layer))
    return GroupView(name=INDEXER, num_slots=num_slots, page_size=1, sources=tuple(sources))


def index_pages(
    pages: Tensor, page_size: int, layer: int, write: Callable[[int], None]
) -> tuple[KVSource, ...]:
    """fp8 keys of all slots of a page, then a float32 scale for each. Raises UnsupportedEngine."""
    split = SplitPages(
        name=f"the index keys of layer {layer}", pages=pages, page_size=page_size,
        data_bytes=pages.shape[1] // page_size - _SCALE_BYTES, scale_bytes=_SCALE_BYTES,
    )  # fmt: skip
    return split.sources(layer, write)


def write_key(pool: Any, layer: int, slot: int) -> None:
    """Write a key to a slot of a pool's layer, by the pool's own method."""
    key = torch.linspace(-300, 400, int(pool.index_head_dim), device=pool.device)[None]
    scale = torch.full((1, 1), 1.1, device=pool.device)
    slots = torch.tensor([slot], device=pool.device)
    pool.set_index_k_scale_buffer(layer, slots, key.to(torch.float8_e4m3fn), scale)
