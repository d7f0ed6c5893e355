"""Run as a program: slot mappings by the kernels of vLLM's V1 and V2 runner, in Triton's interpreter.

Prints how many tokens each of them mapped as the canary does, summed over ranks. `TRITON_INTERPRET=1` is to
be set.
"""

from __future__ import annotations

import importlib
import json

import torch
from torch import Tensor

from canary_kernels.buffers import Sharding
from tests.engines.vllm.real.interpreted import stand_in_driver
from tests.engines.vllm.sharded_mapping import (
    MAX_TOKENS,
    Batch,
    local_mapping,
    make_batch,
    sharded_slots,
    shown,
)

SHARES = [(16, 2, 1), (16, 2, 16), (32, 4, 8), (16, 8, 1)]  # block size, ranks, interleave


def main() -> None:
    """Raises AssertionError where they differ."""
    stand_in_driver()
    equal = {"v1": 0, "v2": 0}
    for block_size, ranks, interleave in SHARES:
        batch = make_batch(block_size, ranks, ranks, requests=6, longest=400)
        for rank in range(ranks):
            sharding = Sharding(ranks=ranks, rank=rank, interleave=interleave)
            slots, expected = sharded_slots(block_size, sharding), local_mapping(batch, sharding)
            for name, map_slots in (("v1", mapped_by_v1), ("v2", mapped_by_v2)):
                mapping = map_slots(block_size, sharding, batch)
                assert torch.equal(mapping, expected), (name, sharding)
                assert shown(slots, batch, mapping) == batch.slots, (name, sharding)
                equal[name] += len(batch.slots)
    print(json.dumps(equal))


def mapped_by_v1(block_size: int, sharding: Sharding, batch: Batch) -> Tensor:
    from vllm.v1.worker.block_table import BlockTable

    requests, width = batch.table.shape
    device = torch.device("cpu")
    table = BlockTable(block_size, requests, width, MAX_TOKENS, False, device, sharding.interleave)
    table.dcp_world_size, table.dcp_rank = sharding.ranks, sharding.rank
    table.block_table.gpu.copy_(batch.table)
    table.compute_slot_mapping(requests, batch.starts, batch.positions)
    found: Tensor = table.slot_mapping.gpu[: len(batch.slots)]
    return found


def mapped_by_v2(block_size: int, sharding: Sharding, batch: Batch) -> Tensor:
    importlib.import_module("vllm.v1.worker.cpu.shm")  # memory that is not pinned
    from vllm.v1.worker.gpu.block_table import BlockTables

    requests, width = batch.table.shape
    tables = BlockTables(
        [block_size], requests, MAX_TOKENS, [width], torch.device("cpu"), sharding.ranks, sharding.rank,
        sharding.interleave,
    )  # fmt: skip
    tables.block_tables[0].gpu.copy_(batch.table)
    rows = torch.arange(requests, dtype=torch.int32)
    count = len(batch.slots)
    found: Tensor = tables.compute_slot_mappings(rows, batch.starts, batch.positions, count)[0]
    return found


if __name__ == "__main__":
    main()
