"""Gives the model "latent" the pool of DeepSeek-V3.2, whose attention runs on GPUs only.

The pool is SGLang's own class, made where SGLang makes its pools. All prompts are shorter
than what its indexer would choose, so that it would choose everything, as latent attention does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SIZE = 128
PAGE = 64  # slots, as its kernels ask
SHARING = (False, True, False)  # whether a layer takes the choice of the layer before


def add_index_keys(patch: Callable[..., None]) -> None:
    """Every pool made from now on has them, and every latent layer fills its own in its forwards."""
    from sglang.srt.mem_cache import kv_cache_configurator as configurator
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA as Attention

    def make(size: int, **given: Any) -> Any:
        row = given["kv_lora_rank"] + given["qk_rope_head_dim"]
        return DSATokenToKVPool(
            size, **given, index_head_dim=SIZE, kv_cache_dim=row, skip_topk_layers=list(SHARING)
        )

    patch(configurator, "MLATokenToKVPool", make)
    run = Attention.forward

    def forward(
        self: Any, *, positions: Tensor, hidden_states: Tensor, forward_batch: Any, **more: Any
    ) -> Any:
        pool = get_token_to_kv_pool()
        if not SHARING[self.layer_id]:
            keys = hidden_states[:, :SIZE].float() + 0.01 * positions[:, None]
            scales = keys.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
            quantised = (keys / scales).to(torch.float8_e4m3fn)
            pages = pool.get_index_k_with_scale_buffer(self.layer_id)
            put_keys(pages, pool.index_page_size, forward_batch.out_cache_loc, quantised, scales)
        return run(
            self, positions=positions, hidden_states=hidden_states, forward_batch=forward_batch, **more
        )

    patch(Attention, "forward", forward)


def put_keys(pages: Tensor, page_size: int, slots: Tensor, keys: Tensor, scales: Tensor) -> None:
    """What the pools' `set_index_k_scale_buffer` writes, whose kernel takes milliseconds a key on a CPU."""
    page, place = (slots // page_size)[:, None], (slots % page_size)[:, None]
    pages[page, place * SIZE + torch.arange(SIZE)] = keys.view(torch.uint8)
    pages[page, page_size * SIZE + place * 4 + torch.arange(4)] = scales.view(torch.uint8)
