"""SGLang's KV pool as a GroupView: slots, layers, and the location of their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from canary_kernels.buffers import KVSource
from canary_kernels.layout import Part
from canary_obs.engine_api.views import GroupView, KVAllocation
from canary_obs.engines.toolkit.placement import LayerWrite, Placement, find_placements
from canary_obs.errors import UnsupportedEngine

FULL = "full"
_PROBED = 3  # slots that a probe writes to


def find_group(runner: Any) -> GroupView:
    """The group of a model runner with one plain pool. Raises UnsupportedEngine for an unknown layout.

    Writes to the first slots and restores them; no forward may run meanwhile.
    """
    pool = runner.token_to_kv_pool
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd" or getattr(pool, "is_quantized_kv_cache", False):
        raise UnsupportedEngine(
            f"SGLang's KV cache layout {layout!r} with quantisation "
            f"{getattr(pool, 'is_quantized_kv_cache', False)} is not covered yet; "
            "use the default layout and a KV cache of a plain number type"
        )
    sources: list[KVSource] = []
    likely: dict[Part, tuple[Placement, ...]] = {}  # the layer before: nearly always the same for the next
    for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
        for part, cache, others in _parts(pool, layer):
            written = _layer_write(pool, layer, part, cache, others, runner.dtype)
            saved = [(other, other[:_PROBED].clone()) for other in others]
            try:
                likely[part] = find_placements(written, likely.get(part, ()))
            finally:
                for other, content in saved:
                    other[:_PROBED] = content
            sources += [place.source(cache, layer, 0) for place in likely[part]]
    # The slot table holds slots, also where the allocator hands out whole pages.
    return GroupView(name=FULL, num_slots=_buffers(pool)[0].shape[0], page_size=1, sources=tuple(sources))


def kv_allocation(runner: Any) -> KVAllocation:
    """From the pool's own report of its size, and the model's configuration."""
    size = runner.token_to_kv_pool.get_kv_size_bytes()
    held = sum(size) if isinstance(size, tuple) else size
    return KVAllocation(bytes=int(held), layers={(FULL,): int(runner.model_config.num_hidden_layers)})


def _is_latent(pool: Any) -> bool:
    """Whether the pool stores one latent vector per token instead of K and V (MLA)."""
    return hasattr(pool, "kv_lora_rank")


def _buffers(pool: Any) -> list[Tensor]:
    return list(pool.kv_buffer if _is_latent(pool) else pool.k_buffer)


def _parts(pool: Any, layer: int) -> Iterator[tuple[Part, Tensor, list[Tensor]]]:
    """Of each part of a layer: its tensor, and the others that a write changes as well."""
    index = layer - pool.start_layer
    if _is_latent(pool):
        yield Part.K, pool.kv_buffer[index], []
        return
    keys, values = pool.k_buffer[index], pool.v_buffer[index]
    yield Part.K, keys, [values]
    yield Part.V, values, [keys]


def _layer_write(
    pool: Any, layer: int, part: Part, cache: Tensor, others: list[Tensor], dtype: torch.dtype
) -> LayerWrite:
    _, heads, elements = cache.shape
    named = SimpleNamespace(layer_id=layer)

    def through(parts: dict[Part, Tensor], slots: Tensor) -> None:
        given = parts[part]
        # The other part gets zeros, and what it held is put back afterwards.
        rest = [torch.zeros((slots.shape[0], *other.shape[1:]), dtype=dtype) for other in others]
        keys, values = (given, rest[0] if rest else given) if part is Part.K else (rest[0], given)
        pool.set_kv_buffer(named, slots, keys, values)

    return LayerWrite(
        name=f"layer {layer}", cache=cache, page_size=1, shapes={part: (heads, elements)}, dtype=dtype,
        write=through,
    )  # fmt: skip
