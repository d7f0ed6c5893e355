"""What `canary-obs bench kernels` measures on: KV pools of known models, batches in random slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from canary_kernels.buffers import GroupBuffers, KVSource, RowBatch, allocate_buffers, source_from_tensor
from canary_kernels.hashing import chain_of, sealed_arrays
from canary_kernels.layout import CHAIN, IDENTITY, STATE_BITS, Part, RecordState

_VOCABULARY = 128_000
_COMPLETE = int(RecordState.COMPLETE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """KV memory of one rank, [layers, parts, slots, heads * head_bytes]."""

    name: str
    layers: int
    parts: tuple[Part, ...]
    heads: int
    head_bytes: int
    slots: int
    # Required shares of the read-only ceiling; None = no requirement.
    random: float | None = None
    sequential: float | None = None
    prefill: float | None = None

    @property
    def words(self) -> int:
        """32-bit words of the whole pool."""
        return self.layers * len(self.parts) * self.slots * self.heads * self.head_bytes // 4

    def sources(self, memory: Tensor) -> list[KVSource]:
        """The pool's sources; `memory` is int32 [words]."""
        shape = self.layers, len(self.parts), self.slots, self.heads, self.head_bytes
        pool = memory.view(torch.uint8).view(shape)
        return [
            source_from_tensor(pool[layer, index], part, layer)
            for layer in range(self.layers)
            for index, part in enumerate(self.parts)
        ]


_BOTH = Part.K, Part.V
POOLS = (
    Pool(
        name="8B (32 x 8 x 128 bf16)", layers=32, parts=_BOTH, heads=8, head_bytes=256, slots=1 << 15,
        random=0.97, sequential=0.99, prefill=1 / 1.1,
    ),
    Pool(
        name="70B shard of TP8 (80 x 1 x 128 bf16)", layers=80, parts=_BOTH, heads=1, head_bytes=256,
        slots=1 << 16,
    ),
    Pool(name="latent (61 x 576 bf16)", layers=61, parts=(Part.K,), heads=1, head_bytes=1152, slots=1 << 15),
    Pool(
        name="latent with scales (61 x 584 bytes)", layers=61, parts=(Part.K,), heads=1, head_bytes=584,
        slots=1 << 16,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A batch on the GPU whose requests have complete prefixes."""

    buffers: GroupBuffers
    batch: RowBatch
    chains: Tensor  # int64 [requests, prefix + extend + 1]

    def with_new_batch(self) -> Workload:
        """The same with an equal, new RowBatch, as in every engine step: nothing about it is cached."""
        return replace(self, batch=replace(self.batch))


def prefix_workload(requests: int, prefix: int, extend: int) -> Workload:
    """Requests in random slots, each with `prefix` tokens in the cache and `extend` new ones."""
    width = prefix + extend
    slots = torch.randperm(requests * width).view(requests, width)
    tokens = torch.randint(0, _VOCABULARY, (requests, width))
    chains = torch.stack([chain_of(row) for row in tokens])
    columns = {
        "slot_table": slots.int(),
        "rows": torch.arange(requests),
        "starts": torch.zeros(requests, dtype=torch.int64),
        "prefix_lens": torch.full((requests,), prefix),
        "extend_lens": torch.full((requests,), extend),
        "token_starts": torch.arange(requests + 1) * extend,
        "digests": chains[:, prefix].contiguous(),
        "input_ids": tokens[:, prefix:].flatten(),
        "positions": (prefix + torch.arange(extend)).repeat(requests),
        "out_slots": slots[:, prefix:].flatten(),
    }
    clock = torch.ones(1, dtype=torch.int64, device="cuda")
    buffers = allocate_buffers(requests * width, clock)
    records = torch.zeros(requests * width, buffers.records.shape[1], dtype=torch.int64)
    positions = torch.arange(prefix)
    identity = tokens[:, :prefix] | ((positions << STATE_BITS | _COMPLETE) << 32)
    sealed = torch.from_numpy(sealed_arrays(identity.numpy(), chains[:, :prefix].numpy()))
    records[slots[:, :prefix].flatten(), IDENTITY] = sealed.flatten()
    records[slots[:, :prefix].flatten(), CHAIN] = chains[:, :prefix].flatten()
    buffers.records.copy_(records)
    moved = {name: column.cuda() for name, column in columns.items()}
    return Workload(buffers=buffers, batch=RowBatch(page_size=1, **moved), chains=chains.cuda())
