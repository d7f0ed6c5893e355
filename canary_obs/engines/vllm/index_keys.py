"""Keys by which an indexer chooses what sparse attention reads (DeepSeek-V3.2), in caches of their own.

A block holds the fp8 keys of all its tokens, then a float32 scale for each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from canary_kernels.buffers import KVSource, source_from_tensor
from canary_kernels.layout import Part, Plane
from canary_obs.errors import UnsupportedEngine

_SCALE_BYTES = 4
_PROBED = 3  # blocks


def keeps_index_keys(runner: Any, name: str) -> bool:
    """Whether the layer of this name is an indexer's cache."""
    layer = runner.compilation_config.static_forward_context[name]
    return any(base.__name__ == "DeepseekV32IndexerCache" for base in type(layer).__mro__)


def index_sources(name: str, layer: Any, page_size: int, number: int) -> tuple[KVSource, ...]:
    """Keys and scales of a layer, reported under this layer number.

    Raises UnsupportedEngine where vLLM's operation writes something else than the layout above. It is tried
    on the first blocks, which are restored; nothing else may use the cache meanwhile.
    """
    cache: Tensor = layer.kv_cache
    size = cache.shape[-1] - _SCALE_BYTES
    if cache.dim() != 3 or cache.shape[1] != page_size or not cache.is_contiguous() or size < _SCALE_BYTES:
        raise UnsupportedEngine(
            f"the index keys of {name} lie in shape {tuple(cache.shape)} with strides {cache.stride()}: not "
            f"blocks of {page_size} tokens, one row each"
        )
    flat = cache.view(torch.uint8).view(cache.shape[0], -1)
    keys = flat[:, : page_size * size].view(-1, page_size, 1, size)
    scales = flat[:, page_size * size :].view(torch.float32).view(-1, page_size, 1, 1)
    _check_by_writing(name, cache, (keys, scales))
    return (
        source_from_tensor(keys, Part.K, number),
        source_from_tensor(scales, Part.K, number, plane=Plane.SCALES),
    )


def _check_by_writing(name: str, cache: Tensor, places: tuple[Tensor, Tensor]) -> None:
    write = getattr(torch.ops._C_cache_ops, "indexer_k_quant_and_cache", None)
    if write is None:
        raise UnsupportedEngine(
            f"the index keys of {name} are written by an operation that this build of vLLM has not: their "
            "layout cannot be confirmed"
        )
    keys, scales = places
    page_size, size = keys.shape[1], keys.shape[3]
    slots = sorted({0, 1, page_size - 1, (min(_PROBED, cache.shape[0]) - 1) * page_size + page_size // 2})
    probed = cache[:_PROBED]
    saved = probed.clone()
    try:
        for slot in slots:
            page, place = divmod(slot, page_size)
            for fill in (0x00, 0xFF):  # a byte of the scale may be 0; 0xFF would be part of a NaN
                probed.view(torch.uint8).fill_(fill)
                row = torch.linspace(-3, 5, size, device=cache.device)[None].to(torch.bfloat16)
                write(row, cache, torch.tensor([slot], device=cache.device), size, "ue8m0")
                changed = probed.view(torch.uint8) != fill
                keys[page, place], scales.view(torch.uint8)[page, place] = fill, fill
                elsewhere = bool((probed.view(torch.uint8) != fill).any())
                if elsewhere or (fill and int(changed.sum()) != size + _SCALE_BYTES):
                    raise UnsupportedEngine(
                        f"vLLM writes the index keys of {name} elsewhere than expected: {int(changed.sum())} "
                        f"bytes of slot {slot} are not its {size} of keys and {_SCALE_BYTES} of the scale"
                    )
    finally:
        probed.copy_(saved)
