"""How the backends of vLLM's attention layers write K and V, to find where these lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from canary_kernels.layout import Part
from canary_obs.errors import UnsupportedEngine
from canary_obs.kv_locations.placement import LayerWrite


def is_latent(layer: Any) -> bool:
    """Whether the layer stores one latent vector per token instead of K and V (MLA)."""
    return hasattr(layer, "kv_lora_rank")


def layer_write(name: str, layer: Any, cache: Tensor, page_size: int, dtype: torch.dtype) -> LayerWrite:
    """Of one layer. Raises UnsupportedEngine for a backend that has no write of its own."""
    write = getattr(layer.impl, "do_kv_cache_update", None)
    if write is None:
        raise UnsupportedEngine(
            f"{name}: attention backend {type(layer.impl).__name__} writes its KV cache inside its forward, "
            "so its layout cannot be detected; choose another attention backend"
        )
    shapes, through = (_latent if is_latent(layer) else _separate)(layer, cache, write)
    return LayerWrite(
        name=name, cache=cache, page_size=page_size, shapes=shapes, dtype=dtype, write=through
    )  # fmt: skip


_Write = Callable[[dict[Part, Tensor], Tensor], None]


def _separate(layer: Any, cache: Tensor, write: Any) -> tuple[dict[Part, tuple[int, int]], _Write]:
    def through(parts: dict[Part, Tensor], slots: Tensor) -> None:
        write(layer, parts[Part.K], parts[Part.V], cache, slots)

    heads, size = int(layer.num_kv_heads), int(layer.head_size)
    return {Part.K: (heads, size), Part.V: (heads, int(getattr(layer, "head_size_v", size)))}, through


def _latent(layer: Any, cache: Tensor, write: Any) -> tuple[dict[Part, tuple[int, int]], _Write]:
    rank, rope = int(layer.kv_lora_rank), int(layer.qk_rope_head_dim)

    def through(parts: dict[Part, Tensor], slots: Tensor) -> None:
        latent, key = parts[Part.K][..., :rank], parts[Part.K][..., rank:]
        write(latent.squeeze(1).contiguous(), key.contiguous(), cache, slots, layer.kv_cache_dtype,
              layer._k_scale)  # fmt: skip

    return {Part.K: (1, rank + rope)}, through
