"""On a GPU: captured launches follow changing lengths; steps neither wait, allocate nor compile."""

import dataclasses
import warnings

import pytest
import torch

from canary_kernels.buffers import RowBatch, allocate_buffers, source_from_tensor
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import compare_slots, complete_slots, plan_fingerprint
from canary_kernels.fingerprint.kernel import fingerprint_kernel
from canary_kernels.layout import NUM_LANES, Part, Phase, RealData
from canary_kernels.verify import verify_rows
from canary_kernels.verify.kernel import rows_kernel
from canary_kernels.write import write_identities
from canary_kernels.write.kernel import write_kernel
from tests.kernels.scenes import random_scene

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

REQUESTS, TABLE_ROWS, TOKENS, SLOTS = 8, 10, 256, 1024


def padded(column: torch.Tensor, length: int, fill: int) -> torch.Tensor:
    return torch.cat([column, torch.full((length - column.shape[0],), fill, dtype=column.dtype)])


def fixed_scene(seed: int) -> tuple[torch.Tensor, RowBatch]:
    """A random scene with damage, padded to shapes that never change; all on the CPU."""
    scene = random_scene(seed, page_size=4)
    batch = scene.batch
    table = torch.full((TABLE_ROWS, batch.slot_table.shape[1]), -1)
    table[: batch.slot_table.shape[0]] = batch.slot_table
    records = torch.zeros(SLOTS, scene.records.shape[1], dtype=torch.int64)
    records[: scene.records.shape[0]] = scene.records
    digests = batch.digests if batch.digests is not None else torch.zeros(batch.rows.shape[0]).long()
    expected = torch.full((0,), -1) if batch.expected_ids is None else batch.expected_ids
    return records, RowBatch(
        slot_table=table,
        page_size=4,
        rows=padded(batch.rows, REQUESTS, -1),
        starts=padded(batch.starts, REQUESTS, 0),
        prefix_lens=padded(batch.prefix_lens, REQUESTS, 0),
        extend_lens=padded(batch.extend_lens, REQUESTS, 0),
        token_starts=padded(batch.token_starts, REQUESTS + 1, int(batch.token_starts[-1])),
        digests=padded(digests, REQUESTS, 0),
        input_ids=padded(batch.input_ids, TOKENS, 0),
        positions=padded(batch.positions, TOKENS, 0),
        out_slots=padded(batch.out_slots, TOKENS, -1),
        expected_ids=padded(expected, TOKENS, -1),
    )


def columns(batch: RowBatch) -> dict[str, torch.Tensor]:
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


class Steps:
    """The checks of a forward on one device."""

    def __init__(self, backend: Backend, memory: torch.Tensor, batch: RowBatch) -> None:
        self.backend, self.batch = backend, batch
        sources = [
            source_from_tensor(memory[layer, part - 1], part, layer)
            for layer in range(memory.shape[0])
            for part in (Part.K, Part.V)
        ]
        self.plan = plan_fingerprint(sources, RealData.ALL, memory.device)
        clock = torch.ones(1, dtype=torch.int64, device=memory.device)
        self.buffers = allocate_buffers(SLOTS, clock)

    def run(self) -> None:
        backend, buffers, batch = self.backend, self.buffers, self.batch
        write_identities(backend, buffers, batch)
        verify_rows(backend, buffers, batch, Phase.HEAD)
        complete_slots(backend, buffers, self.plan, batch.out_slots)
        verify_rows(backend, buffers, batch, Phase.TAIL)
        compare_slots(backend, buffers, self.plan, batch.out_slots, Phase.PATROL)


def pair(seed: int = 0) -> tuple[Steps, Steps]:
    """The reference on the CPU and the kernels on the GPU, over equal memory."""
    memory = torch.randint(-(1 << 31), 1 << 31, (3, 2, SLOTS, 2, 12)).int()
    _, batch = fixed_scene(seed)
    moved = {name: value.cuda() for name, value in columns(batch).items()}
    return (
        Steps(Backend.TORCH, memory, batch),
        Steps(Backend.TRITON, memory.cuda(), RowBatch(page_size=4, **moved)),
    )


def load(steps: Steps, records: torch.Tensor, batch: RowBatch) -> None:
    """A scene into the tensors that the launches hold, in place."""
    steps.buffers.records.copy_(records)
    for name, value in columns(batch).items():
        getattr(steps.batch, name).copy_(value)


def test_captured_once_replayed_with_fifty_batches():
    reference, kernels = pair()
    kernels.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.run()
    kernels.buffers.counters.zero_()
    for seed in range(50):
        records, batch = fixed_scene(seed)
        load(reference, records, batch)
        load(kernels, records, batch)
        reference.run()
        graph.replay()
        assert torch.equal(kernels.buffers.records.cpu(), reference.buffers.records), seed
        assert kernels.buffers.counters.tolist() == reference.buffers.counters.tolist(), seed
    assert reference.buffers.counters[:NUM_LANES].count_nonzero() >= 6


def test_a_step_neither_waits_nor_allocates_nor_compiles():
    _, kernels = pair()
    batches = [kernels.batch]
    for seed in range(1, 20):
        moved = {name: value.cuda() for name, value in columns(fixed_scene(seed)[1]).items()}
        batches.append(RowBatch(page_size=4, **moved))
    kernels.run()
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    compiled = [len(k.device_caches[0][0]) for k in (rows_kernel, write_kernel, fingerprint_kernel)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "does not yet detect all"
            torch.cuda.set_sync_debug_mode("error")
        for batch in batches:
            kernels.batch = batch
            kernels.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    assert [len(k.device_caches[0][0]) for k in (rows_kernel, write_kernel, fingerprint_kernel)] == compiled
