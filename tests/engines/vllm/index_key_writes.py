"""Writes of index keys: the arithmetic of vLLM's CUDA operation, in PyTorch, and another layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SIZE = 128
_LARGEST = 448.0  # of float8_e4m3fn


def quant_and_cache(keys: Tensor, cache: Tensor, slots: Tensor, block: int, scale_format: str) -> None:
    """fp8 keys of all tokens of a block, then their scales; rounded up to a power of two."""
    page_size = cache.shape[1]
    flat = cache.view(torch.uint8).view(cache.shape[0], -1)
    scale = keys.float().abs().amax(-1).clamp(min=1e-4) / _LARGEST
    if scale_format == "ue8m0":
        scale = scale.log2().ceil().exp2()
    elements = (keys.float() / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    pages, places = slots // page_size, slots % page_size
    columns = places[:, None] * block + torch.arange(block)
    flat[pages[:, None], columns] = elements
    scales = page_size * block + places[:, None] * 4 + torch.arange(4)
    flat[pages[:, None], scales] = scale[:, None].contiguous().view(torch.uint8)


def by_rows(keys: Tensor, cache: Tensor, slots: Tensor, block: int, scale_format: str) -> None:
    """Another layout: each token's keys, followed by its scale."""
    whole = torch.zeros((1, cache.shape[1], cache.shape[2]), dtype=torch.uint8)
    quant_and_cache(keys, whole, torch.zeros(1, dtype=torch.int64), block, scale_format)
    row = torch.cat((whole.flatten()[:block], whole.flatten()[cache.shape[1] * block :][:4]))
    cache[slots // cache.shape[1], slots % cache.shape[1]] = row


def register(write: Callable[..., None] = quant_and_cache) -> torch.library.Library:
    """The operation, where this build has none; gone when the library is destroyed."""
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define(
        "indexer_k_quant_and_cache(Tensor k, Tensor(a!) kv_cache, Tensor slot_mapping, "
        "int quant_block_size, str kv_cache_dtype) -> ()"
    )
    library.impl("indexer_k_quant_and_cache", write, "CPU")
    return library
