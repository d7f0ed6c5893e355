"""Gives the model "windows" the pools of DeepSeek-V4, whose attention runs on GPUs only.

The pools are SGLang's own classes, made where SGLang makes its pools. Each attention layer writes
rows that depend on its keys; it computes with a pool of the usual kind, kept with them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.engines.sglang.real.index_keys import put_keys
from tests.engines.sglang.real.models import WINDOW

PAGE = 256  # tokens
RATIOS = (0, 4, 128, 4, 0, 128)  # tokens of a compressed entry, by layer


def add_pools(patch: Callable[..., None], **more: Any) -> None:
    """Every pool with sliding windows made from now on is one of DeepSeek-V4. `more`: parameters of it."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache import kv_cache_configurator as configurator
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    def make(**given: Any) -> Any:
        pool = make_pool(int(given["size"]), int(given["size_swa"]), **more)
        pool.computed_with = SWAKVPool(**given)
        register = pool.register_mapping

        def register_mapping(mapping: Tensor) -> None:
            register(mapping)
            pool.computed_with.register_mapping(mapping)

        pool.register_mapping = register_mapping
        _send(pool, "get_contiguous_buf_infos", pool.computed_with.full_kv_pool)
        _send(pool, "get_state_buf_infos", pool.computed_with.swa_kv_pool)
        return pool

    patch(configurator, "SWAKVPool", make)
    begin, run = Backend.__init__, RadixAttention.forward

    def init(self: Any, runner: Any) -> None:
        pool = runner.token_to_kv_pool
        runner.token_to_kv_pool = pool.computed_with
        begin(self, runner)
        runner.token_to_kv_pool, self.pools = pool, pool

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, batch: Any, *given: Any, **named: Any) -> Any:
        from sglang.srt.model_executor.forward_context import get_attn_backend

        write(get_attn_backend().pools, self.layer_id, k, batch)
        return run(self, q, k, v, batch, *given, **named)

    patch(Backend, "__init__", init)
    patch(RadixAttention, "forward", forward)


def _send(pool: Any, name: str, more: Any) -> None:
    """What the pool's method names for other servers has these buffers as well: attention reads them."""
    own = getattr(pool, name)
    setattr(pool, name, lambda: tuple(map(operator.add, own(), more.get_contiguous_buf_infos())))


def make_pool(size: int, size_swa: int, **more: Any) -> Any:
    """SGLang's pool of so many tokens, and so many of windows."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    given: dict[str, Any] = {
        "max_num_reqs": 8, "swa_size": size_swa, "c4_size": size // 4, "c128_size": size // 128,
        "c4_state_pool_size": 64, "c128_state_pool_size": 64, "page_size": PAGE, "swa_page_size": PAGE,
        "dtype": torch.float8_e4m3fn, "c4_state_dtype": torch.float32, "c128_state_dtype": torch.float32,
        "qk_nope_head_dim": 448, "qk_rope_head_dim": 64, "indexer_head_dim": 128,
        "layer_num": len(RATIOS), "device": "cpu", "enable_memory_saver": False,
        "compression_ratios": list(RATIOS), "sliding_window": WINDOW,
    }  # fmt: skip
    return DeepSeekV4TokenToKVPool(**given | more)


def write(pool: Any, layer: int, keys: Tensor, batch: Any) -> None:
    """A layer's rows of a forward: each token's, and an entry and its index key where a run ends."""
    keys, slots = keys.flatten(1)[:, :64].float(), batch.out_cache_loc
    put_rows(pool.swa_kv_pool, layer, pool.translate_loc_from_full_to_swa(slots), row(keys))
    if not (ratio := RATIOS[layer]):
        return
    ends = (batch.positions + 1) % ratio == 0
    if not bool(ends.any()):
        return
    index = RATIOS[:layer].count(ratio)
    entries = torch.div(slots[ends], ratio, rounding_mode="floor")
    put_rows(pool.kv_pools[ratio], index, entries, row(keys[ends]))
    if ratio in pool.index_pools:
        key = keys[ends].repeat(1, 2)
        scale = key.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
        held = pool.index_pools[ratio]
        pages, quantised = held.index_k_with_scale_buffer[index], (key / scale).to(torch.float8_e4m3fn)
        put_keys(pages, int(held.page_size), entries, quantised, scale)


def row(keys: Tensor) -> Any:
    """Rows of the pools' format that depend on keys, float32 [n, 64]."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import NopeFp8RopeBf16Pack

    scales = keys.abs().amax(-1, keepdim=True).clamp(min=1e-4).log2().ceil()
    return NopeFp8RopeBf16Pack(
        k_nope_fp8=(keys * torch.exp2(-scales)).repeat(1, 7).to(torch.float8_e4m3fn),
        k_rope_bf16=keys.to(torch.bfloat16),
        scale_k_nope_ue8m0=(scales + 127).to(torch.uint8).expand(-1, 7).contiguous(),
    )


def put_rows(pool: Any, index: int, slots: Tensor, rows: Any) -> None:
    """What the pool's `set_key_buffer` writes, whose kernel takes milliseconds for each row on a CPU."""
    size, pages = int(pool.page_size), pool.kv_buffer[index].view(torch.uint8)
    data = torch.cat([rows.k_nope_fp8.view(torch.uint8), rows.k_rope_bf16.view(torch.uint8)], 1)
    page, place = (slots // size)[:, None], (slots % size)[:, None]
    pages[page, place * 576 + torch.arange(576)] = data
    pages[page, size * 576 + place * 8 + torch.arange(7)] = rows.scale_k_nope_ue8m0
