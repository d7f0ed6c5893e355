"""vLLM's packed caches of latent vectors in sliding windows (DeepSeek-V4)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from canary_kernels.buffers import KVSource
from canary_obs.engines.vllm.compressors import keeps_compressor_states, state_sources
from canary_obs.engines.vllm.index_keys import index_sources, keeps_index_keys
from canary_obs.errors import UnsupportedEngine
from canary_obs.kv_locations.split_pages import SplitPages

_SCALE_BYTES = 8  # of a token


def packed_sources(runner: Any, name: str, page_size: int, number: int) -> tuple[KVSource, ...] | None:
    """Of a layer whose cache is no plain K and V, reported under this layer number; None = it is plain.

    Raises UnsupportedEngine where the layout cannot be confirmed.
    """
    layer = runner.compilation_config.static_forward_context[name]
    if keeps_index_keys(runner, name):
        return index_sources(name, layer, page_size, number)
    if keeps_compressor_states(runner, name):
        return state_sources(runner, name, page_size, number)
    classes = {base.__name__ for base in type(layer).__mro__}
    if "DeepseekV4SWACache" in classes:
        return _window_sources(runner, name, layer, page_size, number)
    return None


def _window_sources(runner: Any, name: str, layer: Any, page_size: int, number: int) -> tuple[KVSource, ...]:
    """By writes through the method of the attention layer that fills this cache."""
    cache: Tensor = layer.kv_cache
    size = cache.shape[-1] - _SCALE_BYTES
    if cache.dtype is not torch.uint8 or cache.dim() != 3 or cache.shape[1] != page_size or size < 1:
        raise UnsupportedEngine(
            f"the window of {name} lies in shape {tuple(cache.shape)} of {cache.dtype}: not packed blocks of "
            f"{page_size} tokens"
        )
    if layer.bounded_replay:
        raise UnsupportedEngine(f"the window of {name} is computed again instead of being cached")
    writers = [each for each in runner.model.modules() if getattr(each, "swa_cache_layer", None) is layer]
    if len(writers) != 1:
        raise UnsupportedEngine(f"{len(writers)} layers write the window of {name}: nobody confirms it")
    (writer,) = writers
    # At position 0 nothing is rotated.
    key = torch.full((1, int(writer.head_dim)), 0.75, dtype=runner.model_config.dtype, device=cache.device)
    query = key.expand(int(writer.n_local_heads), -1)[None].contiguous()
    position = torch.zeros(1, dtype=torch.int64, device=cache.device)

    def write(slot: int) -> None:
        slots = torch.tensor([slot], dtype=torch.int64, device=cache.device)
        given = SimpleNamespace(slot_mapping=slots, block_size=page_size)
        writer._fused_qnorm_rope_kv_insert(query.clone(), key.clone(), position, {layer.prefix: given})

    split = SplitPages(
        name=f"the rows of {name}", pages=cache.view(cache.shape[0], -1), page_size=page_size,
        data_bytes=size, scale_bytes=_SCALE_BYTES,
    )  # fmt: skip
    return split.sources(number, write)
