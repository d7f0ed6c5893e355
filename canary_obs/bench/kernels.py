"""`canary-obs bench kernels`: ceilings of the device and the kernels against them, in one run."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from canary_kernels.bandwidth import READERS, read_all
from canary_kernels.buffers import GroupBuffers, allocate_buffers
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import FingerprintPlan, compare_slots, complete_slots, plan_fingerprint
from canary_kernels.layout import IDENTITY, NUM_LANES, Phase, RealData, Reason, RecordState, lane
from canary_kernels.verify import verify_rows
from canary_kernels.write import write_identities
from canary_obs.bench.gpu_facts import environment
from canary_obs.bench.shapes import POOLS, Pool, Scene, prefix_scene
from canary_obs.errors import ConfigurationError

_T = Backend.TRITON
_PENDING = int(RecordState.PENDING) << 32
_CALLS = 10  # per captured graph
_HOST_STEPS = 300
_HOST_LIMIT = 50.0
_FLUSH_WORDS = 64 << 20  # 256 MiB, several times any L2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement. ratio: of the ceiling's time to ours for bytes; limit: what it must reach."""

    work: str
    us: float
    tb_s: float | None = None
    ratio: float | None = None
    limit: str = ""
    met: bool | None = None


def run_kernels(output: Path | None, as_json: bool) -> int:
    """Measures, prints, writes JSON; returns the exit code: 1 when a planted flip went uncounted."""
    if not torch.cuda.is_available():
        raise ConfigurationError("device", "cpu", "these are GPU kernels", "Run it on a machine with a GPU.")
    torch.manual_seed(1)
    rows = [*_decode_rows(), *_prefill_rows()]
    for pool in POOLS:
        rows += _pool_rows(pool)
    result = {"environment": environment(), "rows": [asdict(row) for row in rows]}
    text = json.dumps(result, indent=1)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        _print(rows)
    return 0


def device_us(call: Callable[[], object], repeats: int = 15) -> float:
    """Median over graph replays, in microseconds: the device's time without the host's."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _CALLS)
    return statistics.median(times)


def _host_us(scene: Scene, plan: FingerprintPlan) -> float:
    """Median host time of a step's launches, in microseconds; every step brings a batch nobody has seen."""
    scenes = [scene.fresh() for _ in range(_HOST_STEPS)]
    times = []
    for fresh in scenes:
        started = time.perf_counter()
        _step(fresh, plan)
        times.append((time.perf_counter() - started) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def _must(work: str, us: float, limit: float | None = None) -> Row:
    if limit is None:
        return Row(work=work, us=us)
    return Row(work=work, us=us, limit=f"<= {limit:g} us", met=us <= limit)


def _expect(buffers: GroupBuffers, found: int, phase: Phase, reason: Reason, what: str) -> None:
    """Counters hold exactly the planted violations, of one lane; then start again at 0."""
    counters = buffers.counters[:NUM_LANES].tolist()
    if sum(counters) != found or counters[lane(phase, reason)] != found:
        raise SystemExit(f"{what}: expected {found} of {reason.name} at {phase.name}, counted {counters}")
    buffers.counters.zero_()


def _check_links(scene: Scene, what: str) -> None:
    """Nothing to report as it is; one planted flip of a token is counted once."""
    verify_rows(_T, scene.buffers, scene.batch, Phase.HEAD)
    _expect(scene.buffers, 0, Phase.HEAD, Reason.CHAIN, what)
    middle = scene.batch.slot_table[0, int(scene.batch.prefix_lens[0]) // 2]
    scene.buffers.records[middle, IDENTITY] ^= 1 << 5
    verify_rows(_T, scene.buffers, scene.batch, Phase.HEAD)
    _expect(scene.buffers, 1, Phase.HEAD, Reason.CHAIN, what)
    scene.buffers.records[middle, IDENTITY] ^= 1 << 5


def _decode_rows() -> list[Row]:
    limits = {(256, 4096): (17.0, 40.0), (64, 4096): (5.5, None)}
    plan = plan_fingerprint([], RealData.ALL, "cuda")
    flush = torch.zeros(_FLUSH_WORDS, dtype=torch.int32, device="cuda")
    rows = []
    for requests, prefix in (
        (256, 4096), (64, 4096), (1, 4096), (1, 131072), (8, 131072), (16, 32768), (1024, 1024), (1024, 4096),
    ):  # fmt: skip
        scene = prefix_scene(requests, prefix, 1)
        name, (verify, step) = f"decode {requests} x {prefix}", limits.get((requests, prefix), (None, None))
        _check_links(scene, name)
        rows.append(_must(f"{name}: verify", device_us(partial(_verify, scene)), verify))
        if verify is not None:
            cold = device_us(partial(_verify_cold, scene, flush)) - device_us(flush.zero_)
            rows.append(_must(f"{name}: verify, L2 flushed", cold))
        us = device_us(partial(_step, scene, plan))
        rows.append(_must(f"{name}: head and tail with writes", us, step))
        _expect(scene.buffers, 0, Phase.HEAD, Reason.CHAIN, name)
        rows.append(_must(f"{name}: host, 4 launches", _host_us(scene, plan), _HOST_LIMIT))
    return rows


def _verify(scene: Scene) -> None:
    verify_rows(_T, scene.buffers, scene.batch, Phase.HEAD)


def _verify_cold(scene: Scene, flush: torch.Tensor) -> None:
    flush.zero_()
    _verify(scene)


def _step(scene: Scene, plan: FingerprintPlan) -> None:
    write_identities(_T, scene.buffers, scene.batch)
    verify_rows(_T, scene.buffers, scene.batch, Phase.HEAD)
    complete_slots(_T, scene.buffers, plan, scene.batch.out_slots)
    verify_rows(_T, scene.buffers, scene.batch, Phase.TAIL)


def _prefill_rows() -> list[Row]:
    rows = []
    for requests, prefix, extend, limit in (
        (1, 0, 8192, 5.0), (8, 0, 1024, None), (1, 0, 131072, None), (4, 4096, 2048, None),
    ):  # fmt: skip
        scene = prefix_scene(requests, prefix, extend)
        name = f"prefill {requests} x {extend} after {prefix}"
        write_identities(_T, scene.buffers, scene.batch)
        chains = scene.buffers.records[scene.batch.out_slots, 1].view(requests, extend)
        if not torch.equal(chains, scene.chains[:, prefix : prefix + extend]):
            raise SystemExit(f"{name}: the chains written are not those of the tokens")
        _expect(scene.buffers, 0, Phase.HEAD, Reason.WRITE_POSITION, name)
        us = device_us(partial(write_identities, _T, scene.buffers, scene.batch))
        rows.append(_must(f"{name}: chain", us, limit))
    return rows


def _pool_rows(pool: Pool) -> list[Row]:
    memory = torch.randint(-(1 << 31), (1 << 31) - 1, (pool.words,), dtype=torch.int32, device="cuda")
    plan = plan_fingerprint(pool.sources(memory), RealData.ALL, "cuda")
    every = torch.arange(pool.slots, device="cuda")
    shuffled = torch.randperm(pool.slots, device="cuda")
    buffers = allocate_buffers(pool.slots, torch.ones(1, dtype=torch.int64, device="cuda"))
    ceiling = _read_us(memory) * plan.bytes_per_slot * pool.slots / memory.nbytes
    rows = [_bytes_row(f"{pool.name}: read-only ceiling", ceiling, plan, pool.slots, ceiling, None)]
    if pool is POOLS[0]:
        half = memory.view(2, -1)
        copied = device_us(partial(half[0].copy_, half[1]), 5)
        rows.append(Row(work=f"{pool.name}: copy", us=copied, tb_s=memory.nbytes / copied / 1e6))
        memory.random_(-(1 << 31), (1 << 31) - 1)
    _pend(buffers)
    complete_slots(_T, buffers, plan, every)
    word = memory[memory.numel() // 3 : memory.numel() // 3 + 1]
    for found in (1, 0):
        word ^= 1 << 7
        compare_slots(_T, buffers, plan, every, Phase.PATROL)
        _expect(buffers, found, Phase.PATROL, Reason.KV_DATA, pool.name)
    for what, slots, limit in (("random", shuffled, pool.random), ("sequential", every, pool.sequential)):
        us = device_us(partial(compare_slots, _T, buffers, plan, slots, Phase.PATROL), 7)
        rows.append(_bytes_row(f"{pool.name}: sweep, {what}", us, plan, pool.slots, ceiling, limit))
    for count, limit in ((8192, pool.prefill), (256, None)):
        few = shuffled[:count]
        us = device_us(partial(_complete, buffers, plan, few)) - device_us(partial(_pend, buffers))
        share = ceiling * count / pool.slots
        rows.append(_bytes_row(f"{pool.name}: fingerprints of {count}", us, plan, count, share, limit))
    _expect(buffers, 0, Phase.PATROL, Reason.KV_DATA, pool.name)
    return rows


def _bytes_row(
    work: str, us: float, plan: FingerprintPlan, slots: int, ceiling: float, limit: float | None
) -> Row:
    ratio = ceiling / us
    rate = plan.bytes_per_slot * slots / us / 1e6
    if limit is None:
        return Row(work=work, us=us, tb_s=rate, ratio=ratio)
    return Row(work=work, us=us, tb_s=rate, ratio=ratio, limit=f">= {limit:.3f}", met=ratio >= limit)


def _pend(buffers: GroupBuffers) -> None:
    """Every record PENDING, without a witness of earlier bytes."""
    buffers.records.zero_()
    buffers.records[:, IDENTITY] = _PENDING


def _complete(buffers: GroupBuffers, plan: FingerprintPlan, slots: torch.Tensor) -> None:
    _pend(buffers)
    complete_slots(_T, buffers, plan, slots)


def _read_us(memory: torch.Tensor) -> float:
    """The fastest reader's time for all of it."""
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return min(device_us(partial(read_all, memory, sink, r, multiprocessors), 7) for r in READERS)


def _print(rows: list[Row]) -> None:
    table = Table("work", "us", "TB/s", "of ceiling", "must reach", "", title="kernels on this device")
    for row in rows:
        table.add_row(
            row.work,
            f"{row.us:.2f}",
            "" if row.tb_s is None else f"{row.tb_s:.3f}",
            "" if row.ratio is None else f"{row.ratio:.3f}",
            row.limit,
            {None: "", True: "yes", False: "NO"}[row.met],
        )
    Console(width=120).print(table)
