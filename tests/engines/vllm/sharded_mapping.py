"""Batches whose tokens are spread over ranks, and where each token's slot is, in plain Python."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canary_kernels.buffers import Sharding
from canary_obs.engine_api.views import GroupStep, GroupView, StepTypes
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.sharded_slots import ShardedSlots

MAX_TOKENS = 4096
TYPES = StepTypes(
    slot_table=torch.int32, rows=torch.int64, lengths=torch.int32, input_ids=torch.int32,
    positions=torch.int64, out_slots=torch.int64, has_digests=True, expected_ids=None, has_known_tokens=True,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One forward."""

    table: Tensor  # int32 [num_requests, width]
    starts: Tensor  # int32 [num_requests + 1]
    positions: Tensor  # int64 [num_tokens]
    slots: list[int]  # as in one cache of all ranks


def make_batch(block_size: int, ranks: int, seed: int, *, requests: int = 9, longest: int = 900) -> Batch:
    """Random requests, of which some decode and others prefill; block 0 belongs to nobody."""
    draw = random.Random(seed)
    page = block_size * ranks
    width = -(-longest // page) + 2
    blocks = list(range(1, requests * width + 1))
    draw.shuffle(blocks)
    table = torch.tensor(blocks, dtype=torch.int32).view(requests, width)
    starts, positions, slots = [0], list[int](), list[int]()
    for request in range(requests):
        before = draw.randrange(longest)
        after = before + (1 if request % 3 else draw.randrange(1, longest - before + 1))
        for position in range(before, after):
            block = int(table[request, position // page])
            positions.append(position)
            slots.append(block * page + position % page)
        starts.append(len(positions))
    return Batch(
        table=table,
        starts=torch.tensor(starts, dtype=torch.int32),
        positions=torch.tensor(positions),
        slots=slots,
    )


def sharded_slots(block_size: int, sharding: Sharding) -> ShardedSlots:
    """Of one group named "full"."""
    page = block_size * sharding.ranks
    view = GroupView(name="full", num_slots=1000 * page, page_size=page, sources=())
    group = VllmGroup(
        number=0, num_blocks=1000, block_size=page, view=view, layers=("layers.0",), sharding=sharding
    )
    return ShardedSlots([group], MAX_TOKENS, TYPES, torch.device("cpu"))


def shown(slots: ShardedSlots, batch: Batch, mapping: Tensor) -> list[int]:
    """Where the forward writes, with this slot mapping of vLLM's."""
    own: dict[str, Any] = {"full": GroupStep(slot_table=batch.table, out_slots=mapping)}
    return slots.steps(own, batch.positions, batch.starts)["full"].out_slots.tolist()


def local_mapping(batch: Batch, sharding: Sharding) -> Tensor:
    """int64 [num_tokens]: the slots of one rank, by the definition of `Sharding`; -1 = another rank's."""
    return torch.tensor([sharding.local(slot) if sharding.holds(slot) else -1 for slot in batch.slots])
