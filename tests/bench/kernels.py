"""Device and host time of the kernels at DESIGN section 4's shapes: python tests/bench/kernels.py."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from canary_kernels.buffers import GroupBuffers, RowBatch, allocate_buffers, source_from_tensor
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import compare_slots, complete_slots, plan_fingerprint
from canary_kernels.hashing import chain_of
from canary_kernels.layout import IDENTITY, NUM_LANES, Part, Phase, RealData
from canary_kernels.verify import verify_rows
from canary_kernels.write import write_identities

LAYERS, HEADS, DIM = 32, 8, 128
SLOTS = 1 << 15
DEVICE = "cuda"
T = Backend.TRITON


@triton.jit
def _read(memory, sink, num_words, BLOCK: tl.constexpr):  # noqa: N803
    total = tl.zeros([BLOCK], tl.int32)
    for first in range(tl.program_id(0) * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        total ^= tl.load(memory + first.to(tl.int64) + tl.arange(0, BLOCK))
    if tl.max(total) == 0x7FFFFFF1:
        tl.store(sink, 1)


def device_us(call: Callable[[], object], repeats: int = 20) -> float:
    """Median over graph replays, in microseconds: the device's time without the host's."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 100)
    return statistics.median(times)


def host_us(call: Callable[[], object], repeats: int = 200) -> float:
    """Median host time of one call, in microseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def rows_batch(requests: int, prefix: int, extend: int, num_slots: int) -> tuple[RowBatch, torch.Tensor]:
    """Requests in random slots, with their tokens [requests, prefix + extend]."""
    width = prefix + extend
    table = torch.randperm(num_slots)[: requests * width].view(requests, width).int()
    tokens = torch.randint(0, 128000, (requests, width))
    columns = {
        "slot_table": table,
        "rows": torch.arange(requests),
        "starts": torch.zeros(requests, dtype=torch.int64),
        "prefix_lens": torch.full((requests,), prefix),
        "extend_lens": torch.full((requests,), extend),
        "token_starts": torch.arange(requests + 1) * extend,
        "digests": torch.stack([chain_of(row[:prefix])[-1] for row in tokens]),
        "input_ids": tokens[:, prefix:].flatten(),
        "positions": (prefix + torch.arange(extend)).repeat(requests),
        "out_slots": table[:, prefix:].flatten().long(),
    }
    return RowBatch(page_size=1, **{name: column.to(DEVICE) for name, column in columns.items()}), tokens


def fill_prefix(buffers: GroupBuffers, batch: RowBatch, tokens: torch.Tensor) -> None:
    """Complete records of every prefix."""
    prefix = int(batch.prefix_lens[0])
    slots = batch.slot_table[:, :prefix].long().cpu()
    identity = tokens[:, :prefix] | (((torch.arange(prefix) << 2) | 2) << 32)
    chain = torch.stack([chain_of(row[:prefix])[:-1] for row in tokens])
    records = torch.zeros(slots.numel(), 4, dtype=torch.int64)
    records[:, 0], records[:, 1] = identity.flatten(), chain.flatten()
    buffers.records[slots.flatten().to(DEVICE)] = records.to(DEVICE)


def bench_rows(results: dict[str, float], requests: int, prefix: int) -> None:
    """Decode: head, tail and writes of one token per request."""
    num_slots = requests * (prefix + 1)
    clock = torch.ones(1, dtype=torch.int64, device=DEVICE)
    buffers = allocate_buffers(num_slots, clock)
    batch, tokens = rows_batch(requests, prefix, 1, num_slots)
    fill_prefix(buffers, batch, tokens)
    plan = plan_fingerprint([], RealData.ALL, DEVICE)
    name = f"decode_{requests}x{prefix}"

    def step() -> None:
        write_identities(T, buffers, batch)
        verify_rows(T, buffers, batch, Phase.HEAD)
        complete_slots(T, buffers, plan, batch.out_slots)
        verify_rows(T, buffers, batch, Phase.TAIL)

    results[f"{name}_verify_us"] = device_us(lambda: verify_rows(T, buffers, batch, Phase.HEAD))
    results[f"{name}_write_us"] = device_us(lambda: write_identities(T, buffers, batch))
    results[f"{name}_head_tail_us"] = device_us(step)
    results[f"{name}_host_us"] = host_us(step)
    assert not buffers.counters[:NUM_LANES].any(), buffers.counters.tolist()


def bench_bytes(results: dict[str, float]) -> None:
    """Sweep of bytes over random and sequential slots, and a prefill's chain and fingerprints."""
    memory = torch.randint(
        -(1 << 31), (1 << 31) - 1, (LAYERS, 2, SLOTS, HEADS * DIM // 2), dtype=torch.int32, device=DEVICE
    )
    pool = memory.view(torch.bfloat16).view(LAYERS, 2, SLOTS, HEADS, DIM)
    sources = [
        source_from_tensor(pool[layer, p - 1], p, layer) for layer in range(LAYERS) for p in (Part.K, Part.V)
    ]
    plan = plan_fingerprint(sources, RealData.ALL, DEVICE)
    clock = torch.ones(1, dtype=torch.int64, device=DEVICE)
    buffers = allocate_buffers(SLOTS, clock)
    sink = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    ceiling = device_us(lambda: _read[(132 * 16,)](memory, sink, memory.numel(), BLOCK=2048, num_warps=4), 5)
    total = SLOTS * plan.bytes_per_slot
    results["read_ceiling_tb_s"] = total / ceiling / 1e6
    every = torch.arange(SLOTS, device=DEVICE)
    buffers.records[:, IDENTITY] = 1 << 32
    complete_slots(T, buffers, plan, every)
    for name, slots in (("random", torch.randperm(SLOTS, device=DEVICE)), ("sequential", every)):
        taken = device_us(lambda slots=slots: compare_slots(T, buffers, plan, slots, Phase.PATROL), 5)
        results[f"sweep_{name}_tb_s"] = total / taken / 1e6
        results[f"sweep_{name}_of_ceiling"] = ceiling / taken
    assert not buffers.counters[:NUM_LANES].any()
    batch, _ = rows_batch(1, 0, 8192, SLOTS)
    results["prefill_8192_write_us"] = device_us(lambda: write_identities(T, buffers, batch))
    slots = batch.out_slots

    def complete() -> None:
        buffers.records[:, IDENTITY] = 1 << 32
        complete_slots(T, buffers, plan, slots)

    reset = device_us(lambda: buffers.records[:, IDENTITY].fill_(1 << 32))
    results["prefill_8192_fingerprint_us"] = device_us(complete) - reset
    results["prefill_8192_of_ceiling"] = (
        slots.shape[0] / SLOTS * ceiling / results["prefill_8192_fingerprint_us"]
    )
    results["decode_256_compare_us"] = device_us(
        lambda: compare_slots(T, buffers, plan, slots[:256], Phase.PATROL)
    )


def main() -> None:
    """Print one JSON object."""
    results: dict[str, float] = {}
    bench_rows(results, 256, 4096)
    bench_rows(results, 64, 4096)
    bench_bytes(results)
    print(json.dumps({name: round(value, 3) for name, value in results.items()}, indent=1))


if __name__ == "__main__":
    main()
