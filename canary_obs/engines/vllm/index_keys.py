"""vLLM's caches of an indexer's keys (DeepSeek-V3.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from canary_kernels.buffers import KVSource
from canary_obs.errors import UnsupportedEngine
from canary_obs.kv_locations.split_pages import SplitPages

_SCALE_BYTES = 4


def keeps_index_keys(runner: Any, name: str) -> bool:
    """Whether the layer of this name is an indexer's cache."""
    layer = runner.compilation_config.static_forward_context[name]
    return any(base.__name__ == "DeepseekV32IndexerCache" for base in type(layer).__mro__)


def index_sources(name: str, layer: Any, page_size: int, number: int) -> tuple[KVSource, ...]:
    """Keys and scales of a layer, a float32 for each slot, reported under this layer number.

    Raises UnsupportedEngine where vLLM's operation writes something else. It is tried on the first blocks,
    which are restored; nothing else may use the cache meanwhile.
    """
    cache: Tensor = layer.kv_cache
    size = cache.shape[-1] - _SCALE_BYTES
    if cache.dim() != 3 or cache.shape[1] != page_size or not cache.is_contiguous() or size < _SCALE_BYTES:
        raise UnsupportedEngine(
            f"the index keys of {name} lie in shape {tuple(cache.shape)} with strides {cache.stride()}: not "
            f"blocks of {page_size} tokens, one row each"
        )
    quantise = getattr(torch.ops._C_cache_ops, "indexer_k_quant_and_cache", None)
    if quantise is None:
        raise UnsupportedEngine(
            f"the index keys of {name} are written by an operation that this build of vLLM has not: their "
            "layout cannot be confirmed"
        )

    key = torch.linspace(-3, 5, size, device=cache.device)[None].to(torch.bfloat16)

    def write(slot: int) -> None:
        quantise(key, cache, torch.tensor([slot], device=cache.device), size, "ue8m0")

    split = SplitPages(
        name=f"the index keys of {name}", pages=cache.view(torch.uint8).view(cache.shape[0], -1),
        page_size=page_size, data_bytes=size, scale_bytes=_SCALE_BYTES,
    )  # fmt: skip
    return split.sources(number, write)
