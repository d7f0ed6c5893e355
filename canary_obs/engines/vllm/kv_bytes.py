"""Bytes of KV that vLLM's configuration gives to its layers."""

from __future__ import annotations

from collections.abc import Container
from typing import Any


def configured_bytes(runner: Any, only: int | None = None, layers: Container[str] | None = None) -> int:
    """Of every layer in every group: groups that lie over each other in memory count each.

    `only`: of the group with this number, `layers`: of these layers; None = of all.
    """
    config, total = runner.kv_cache_config, 0
    shared = sharing_layers(runner)
    for number, group in enumerate(config.kv_cache_groups):
        if only not in (None, number):
            continue
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in set(group.layer_names) - shared:
            spec = inner[name] if inner else group.kv_cache_spec
            keeps_kv = type(spec).__name__ != "EncoderOnlyAttentionSpec"
            if keeps_kv and (layers is None or name in layers):
                total += _page_bytes(spec) * int(config.num_blocks)
    return total


def sharing_layers(runner: Any) -> set[str]:
    """Layers that read another layer's KV and have none of their own."""
    layers = runner.compilation_config.static_forward_context
    target = "kv_sharing_target_layer_name"
    return {name for name, layer in layers.items() if getattr(layer, target, None) is not None}


def _page_bytes(spec: Any) -> int:
    """Bytes of one block in one layer, without what pads it to the size of other layers' blocks."""
    for name in ("unpadded_page_size_bytes", "real_page_size_bytes", "page_size_bytes"):
        if (size := getattr(spec, name, None)) is not None:
            return int(size)
    raise AttributeError(f"{type(spec).__name__} has no size of a page")


def cache_bytes(runner: Any, layer: str) -> int:
    """Of a layer's own cache tensor."""
    cache = runner.compilation_config.static_forward_context[layer].kv_cache
    return int(cache.numel() * cache.element_size())
