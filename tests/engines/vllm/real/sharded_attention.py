"""Importing it lets a vLLM worker on CPUs spread a request's tokens over ranks, which it refuses.

vLLM's attention for CPUs returns no sums that ranks could combine (the softmax's LSE), and its slot mapping
is for one rank. These stand-ins work as on a GPU: each rank writes its own tokens and attends to them with
the queries of all ranks, which then exchange outputs and LSE. Workers import it for `OfWorkers`, which adds
nothing to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Attention
from vllm.v1.worker.block_table import ComputeSlotMappingKernel


class OfWorkers:
    """Adds nothing to a worker."""


def _with_interleave(original: Callable[..., None]) -> Callable[..., None]:
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        original(self, *args, **kwargs)
        self.interleave = get_current_vllm_config().parallel_config.cp_kv_cache_interleave_size

    return made


def _mapping_over(original: Callable[..., None]) -> Callable[..., None]:
    # In the order of the kernel's own parameters, by which vLLM passes them.
    def mapping(
        num_tokens: int, max_tokens: int, query_start_loc: Tensor, positions: Tensor, block_table: Tensor,
        stride: int, slot_mapping: Tensor, size: int, ranks: int = 1, rank: int = 0, interleave: int = 1,
        pad: int = -1, *rest: int,
    ) -> None:  # fmt: skip
        if ranks == 1:
            original(
                num_tokens, max_tokens, query_start_loc, positions, block_table, stride, slot_mapping, size
            )
            return
        count = int(query_start_loc[-1])
        request = torch.repeat_interleave(torch.arange(len(query_start_loc) - 1), query_start_loc.diff())
        places = positions[:count].long()
        blocks = block_table[request, places // (size * ranks)].long()
        own = places // interleave % ranks == rank
        within = places % (size * ranks) // (interleave * ranks) * interleave + places % interleave
        slot_mapping.fill_(pad)
        slot_mapping[:count] = torch.where(own, blocks * size + within, pad)

    return mapping


def _write_over(original: Callable[..., None]) -> Callable[..., None]:
    def do_kv_cache_update(
        self: Any, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor
    ) -> None:
        if self.dcp_world_size == 1:
            original(self, layer, key, value, cache, slots)
            return
        own = slots >= 0
        block, within = slots[own] // cache.shape[2], slots[own] % cache.shape[2]
        cache[block, :, within] = torch.cat((key, value), dim=-1)[: len(slots)][own].to(cache.dtype)

    return do_kv_cache_update


def _forward_over(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(
        self: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, metadata: Any,
        output: Tensor, *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if self.dcp_world_size == 1 or metadata is None:
            return original(self, layer, query, key, value, cache, metadata, output, *args, **kwargs)
        from vllm.distributed import get_dcp_group

        ranks, count = get_dcp_group(), metadata.num_actual_tokens
        queries = ranks.all_gather(query[:count].contiguous(), dim=1)
        found, sums = _attend_to_own(self, queries, cache, metadata)
        outputs = ranks.all_gather(found[None], dim=0)
        shares = ranks.all_gather(sums[None], dim=0).softmax(dim=0)
        heads = slice(self.dcp_rank * self.num_heads, (self.dcp_rank + 1) * self.num_heads)
        own = (outputs * shares[..., None]).sum(dim=0)[:, heads]
        output[:count] = own.reshape(output[:count].shape)
        return output

    return forward


def _attend_to_own(self: Any, queries: Tensor, cache: Tensor, metadata: Any) -> tuple[Tensor, Tensor]:
    """Of all heads' queries [n, heads, size] over this rank's tokens: outputs like them, LSE [n, heads]."""
    ranks, rank, interleave, size = self.dcp_world_size, self.dcp_rank, self.interleave, self.head_size
    found, sums = torch.zeros_like(queries), torch.full(queries.shape[:2], -torch.inf)
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for request, length in enumerate(lengths[: len(starts) - 1]):
        own = slice(starts[request], starts[request + 1])
        places = torch.arange(length)
        places = places[places // interleave % ranks == rank]
        if own.start == own.stop or not len(places):
            continue
        local = places // (interleave * ranks) * interleave + places % interleave
        blocks = metadata.block_table[request, local // cache.shape[2]].long()
        held = cache[blocks, :, local % cache.shape[2]]  # [tokens, 1, K and V]
        scores = torch.einsum("qhd,td->qht", queries[own], held[:, 0, :size]) * self.scale
        asked = torch.arange(length - (own.stop - own.start), length)
        scores.masked_fill_((places > asked[:, None])[:, None], -torch.inf)
        sums[own] = scores.logsumexp(dim=-1)
        weights = torch.nan_to_num(scores.softmax(dim=-1))
        found[own] = torch.einsum("qht,td->qhd", weights, held[:, 0, size:])
    return found, sums


Attention.can_return_lse_for_decode = Attention.supports_dcp = True
Attention.__init__ = _with_interleave(Attention.__init__)
Attention.forward = _forward_over(Attention.forward)
Attention.do_kv_cache_update = _write_over(Attention.do_kv_cache_update)
# Else Triton's interpreter runs vLLM's own kernel.
if isinstance(override := ComputeSlotMappingKernel.kernel, KernelOverride):
    override._impl = _mapping_over(override._impl)
