"""Gives a model with latent attention the caches of DeepSeek-V3.2's indexers, which run on GPUs only.

The caches are vLLM's own class, allocated by vLLM in the group of the attention layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.models import deepseek_v2
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder

from tests.engines.vllm.index_key_writes import SIZE, quant_and_cache


@dataclass(frozen=True)
class _Metadata:
    """What attention over these keys would be given."""

    block_table: Tensor
    slot_mapping: Tensor


class _MetadataBuilder(AttentionMetadataBuilder[Any]):
    """The table and the slots of the batch."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        given = common_attn_metadata
        return _Metadata(given.block_table_tensor, given.slot_mapping)


class _Storage(AttentionBackend):
    """Allocates; the attention layer does the rest."""

    @staticmethod
    def get_name() -> str:
        return "INDEX_KEYS"

    @staticmethod
    def get_impl_cls() -> Any:
        return None

    @staticmethod
    def get_builder_cls() -> Any:
        return _MetadataBuilder

    @staticmethod
    def get_kv_cache_shape(blocks: int, block_size: int, heads: int, size: int, *_: Any) -> tuple[int, ...]:
        return blocks, block_size, size


class IndexKeys(deepseek_v2.DeepseekV32IndexerCache):
    """One layer's cache."""

    def get_attn_backend(self) -> Any:
        return _Storage


def add_index_keys(patch: Callable[..., None], *, filled: bool) -> None:
    """Every attention layer made from now on has an indexer's cache, and fills it in its forwards."""
    attention = deepseek_v2.DeepseekV2MLAAttention
    make, run = attention.__init__, attention.forward

    def init(self: Any, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        prefix = f"{named['prefix']}.indexer.k_cache"
        cache_config = named["cache_config"]
        self.index_keys = IndexKeys(SIZE + 4, torch.uint8, prefix, cache_config)

    def forward(self: Any, positions: Tensor, hidden_states: Tensor, *given: Any) -> Any:
        metadata = get_forward_context().attn_metadata
        if filled and metadata is not None:
            slots = metadata[self.index_keys.prefix].slot_mapping
            keys = hidden_states[: slots.shape[0], :SIZE] + 0.01 * positions[: slots.shape[0], None]
            quant_and_cache(keys, self.index_keys.kv_cache, slots, SIZE, "ue8m0")
        return run(self, positions, hidden_states, *given)

    patch(attention, "__init__", init)
    patch(attention, "forward", forward)
