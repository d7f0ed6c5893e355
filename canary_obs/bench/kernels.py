"""`canary-obs bench kernels`: the kernels against the ceilings of the GPU, measured in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from canary_kernels.bandwidth import READERS, read_all
from canary_kernels.buffers import GroupBuffers, allocate_buffers
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import FingerprintPlan, compare_slots, complete_slots, plan_fingerprint
from canary_kernels.layout import IDENTITY, NUM_LANES, Phase, RealData, Reason, RecordState, identity_of, lane
from canary_kernels.verify import verify_rows
from canary_kernels.write import write_identities
from canary_obs.bench.result import BenchResult, Measure
from canary_obs.bench.shapes import POOLS, Pool, Workload, prefix_workload
from canary_obs.errors import CanaryError, ConfigurationError

_TRITON = Backend.TRITON
_PENDING = identity_of(0, 0, RecordState.PENDING)
_CALLS = 10  # per captured graph
_HOST_STEPS = 300
_HOST_LIMIT = 50.0
_FLUSH_WORDS = 64 << 20  # 256 MiB, several times any L2


class WrongResult(CanaryError):
    """A kernel did not compute what it should, so its times are worthless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement."""

    work: str
    us: float
    tb_s: float | None = None  # TB/s
    ratio: float | None = None  # time at the ceiling's bandwidth, over the measured time
    goal: float | None = None  # of the ratio if there is one, otherwise of the time; None = there is none

    @property
    def measure(self) -> Measure:
        """The ratio if there is one, otherwise the time; runs differ by 1 % and by 5 %."""
        if self.ratio is not None:
            return Measure(value=self.ratio, better="higher", noise=0.01, goal=self.goal)
        return Measure(value=self.us, noise=0.05 * self.us, goal=self.goal)


def run_kernels() -> BenchResult:
    """Measure all kernels. Raises ConfigurationError without a GPU, WrongResult if a kernel errs."""
    if not torch.cuda.is_available():
        raise ConfigurationError("device", "cpu", "these are GPU kernels", "Run it on a machine with a GPU.")
    torch.manual_seed(1)
    rows = [*_decode_rows(), *_prefill_rows()]
    for pool in POOLS:
        rows += _pool_rows(pool)
    return BenchResult(
        bench="kernels",
        title="kernels on this device",
        plan={},
        figures={"rows": [asdict(row) for row in rows]},
        measures={row.work: row.measure for row in rows},
    )


def device_us(call: Callable[[], object], repeats: int = 15) -> float:
    """Microseconds of `call` on the device, without the host's time: median over replays of a graph."""
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


def _host_us(workload: Workload, plan: FingerprintPlan) -> float:
    """Median host time of the launches of a step, in microseconds; each step has a new batch."""
    steps = [workload.with_new_batch() for _ in range(_HOST_STEPS)]
    times = []
    for step in steps:
        started = time.perf_counter()
        _step(step, plan)
        times.append((time.perf_counter() - started) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def _time_row(work: str, us: float, limit: float | None = None) -> Row:
    return Row(work=work, us=us, goal=limit)


def _expect(buffers: GroupBuffers, found: int, phase: Phase, reason: Reason, what: str) -> None:
    """Raise WrongResult unless `found` violations were counted, all of one lane; reset the counters."""
    counters = buffers.counters[:NUM_LANES].tolist()
    if sum(counters) != found or counters[lane(phase, reason)] != found:
        raise WrongResult(f"{what}: expected {found} of {reason.name} at {phase.name}, counted {counters}")
    buffers.counters.zero_()


def _check_links(workload: Workload, what: str) -> None:
    """Raise WrongResult unless there is no violation, and one for a flipped token."""
    verify_rows(_TRITON, workload.buffers, workload.batch, Phase.HEAD)
    _expect(workload.buffers, 0, Phase.HEAD, Reason.CHAIN, what)
    middle = workload.batch.slot_table[0, int(workload.batch.prefix_lens[0]) // 2]
    workload.buffers.records[middle, IDENTITY] ^= 1 << 5
    verify_rows(_TRITON, workload.buffers, workload.batch, Phase.HEAD)
    _expect(workload.buffers, 1, Phase.HEAD, Reason.RECORD, what)
    workload.buffers.records[middle, IDENTITY] ^= 1 << 5


def _decode_rows() -> list[Row]:
    limits = {(256, 4096): (17.0, 40.0), (64, 4096): (5.5, None)}
    plan = plan_fingerprint([], RealData.ALL, "cuda")
    flush = torch.zeros(_FLUSH_WORDS, dtype=torch.int32, device="cuda")
    rows = []
    for requests, prefix in (
        (256, 4096), (64, 4096), (1, 4096), (1, 131072), (8, 131072), (16, 32768), (1024, 1024), (1024, 4096),
    ):  # fmt: skip
        workload = prefix_workload(requests, prefix, 1)
        name, (verify, step) = f"decode {requests} x {prefix}", limits.get((requests, prefix), (None, None))
        _check_links(workload, name)
        rows.append(_time_row(f"{name}: verify", device_us(partial(_verify, workload)), verify))
        if verify is not None:
            cold = device_us(partial(_verify_cold, workload, flush)) - device_us(flush.zero_)
            rows.append(_time_row(f"{name}: verify, L2 flushed", cold))
        us = device_us(partial(_step, workload, plan))
        rows.append(_time_row(f"{name}: head and tail with writes", us, step))
        _expect(workload.buffers, 0, Phase.HEAD, Reason.CHAIN, name)
        rows.append(_time_row(f"{name}: host, 4 launches", _host_us(workload, plan), _HOST_LIMIT))
    return rows


def _verify(workload: Workload) -> None:
    verify_rows(_TRITON, workload.buffers, workload.batch, Phase.HEAD)


def _verify_cold(workload: Workload, flush: torch.Tensor) -> None:
    flush.zero_()
    _verify(workload)


def _step(workload: Workload, plan: FingerprintPlan) -> None:
    write_identities(_TRITON, workload.buffers, workload.batch)
    verify_rows(_TRITON, workload.buffers, workload.batch, Phase.HEAD)
    complete_slots(_TRITON, workload.buffers, plan, workload.batch.out_slots)
    verify_rows(_TRITON, workload.buffers, workload.batch, Phase.TAIL)


def _prefill_rows() -> list[Row]:
    rows = []
    for requests, prefix, extend, limit in (
        (1, 0, 8192, 5.0), (8, 0, 1024, None), (1, 0, 131072, None), (4, 4096, 2048, None),
    ):  # fmt: skip
        workload = prefix_workload(requests, prefix, extend)
        name = f"prefill {requests} x {extend} after {prefix}"
        write_identities(_TRITON, workload.buffers, workload.batch)
        chains = workload.buffers.records[workload.batch.out_slots, 1].view(requests, extend)
        if not torch.equal(chains, workload.chains[:, prefix : prefix + extend]):
            raise WrongResult(f"{name}: the chains written are not those of the tokens")
        _expect(workload.buffers, 0, Phase.HEAD, Reason.WRITE_POSITION, name)
        us = device_us(partial(write_identities, _TRITON, workload.buffers, workload.batch))
        rows.append(_time_row(f"{name}: chain", us, limit))
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
        halves = memory.view(2, -1)
        copied = device_us(partial(halves[0].copy_, halves[1]), 5)
        rows.append(Row(work=f"{pool.name}: copy", us=copied, tb_s=memory.nbytes / copied / 1e6))
        memory.random_(-(1 << 31), (1 << 31) - 1)
    _pend(buffers)
    complete_slots(_TRITON, buffers, plan, every)
    word = memory[memory.numel() // 3 : memory.numel() // 3 + 1]
    for found in (1, 0):
        word ^= 1 << 7
        compare_slots(_TRITON, buffers, plan, every, Phase.PATROL)
        _expect(buffers, found, Phase.PATROL, Reason.KV_DATA, pool.name)
    for what, slots, limit in (("random", shuffled, pool.random), ("sequential", every, pool.sequential)):
        us = device_us(partial(compare_slots, _TRITON, buffers, plan, slots, Phase.PATROL), 7)
        rows.append(_bytes_row(f"{pool.name}: sweep, {what}", us, plan, pool.slots, ceiling, limit))
    for count, limit in ((8192, pool.prefill), (256, None)):
        few = shuffled[:count]
        us = device_us(partial(_complete, buffers, plan, few)) - device_us(partial(_pend, buffers))
        share = ceiling * count / pool.slots
        rows.append(_bytes_row(f"{pool.name}: fingerprints of {count}", us, plan, count, share, limit))
    _expect(buffers, 0, Phase.PATROL, Reason.KV_DATA, pool.name)
    return [*rows, *_forward_rows(pool, buffers, plan, shuffled)]


def _forward_rows(pool: Pool, buffers: GroupBuffers, plan: FingerprintPlan, slots: torch.Tensor) -> list[Row]:
    """What a forward of few tokens waits for: its old bytes are compared before it begins."""
    flush = torch.zeros(_FLUSH_WORDS, dtype=torch.int32, device="cuda")
    alone, rows = device_us(flush.zero_, 7), []
    complete_slots(_TRITON, buffers, plan, slots)
    for count in (1, 16, 64, 256):
        us = device_us(partial(_compare_cold, buffers, plan, slots[:count], flush), 7) - alone
        rows.append(_time_row(f"{pool.name}: a forward's comparison of {count}, L2 flushed", us))
    _expect(buffers, 0, Phase.HEAD, Reason.KV_DATA, pool.name)
    return rows


def _compare_cold(
    buffers: GroupBuffers, plan: FingerprintPlan, slots: torch.Tensor, flush: torch.Tensor
) -> None:
    flush.zero_()
    compare_slots(_TRITON, buffers, plan, slots, Phase.HEAD, of_forward=True)


def _bytes_row(
    work: str, us: float, plan: FingerprintPlan, slots: int, ceiling: float, limit: float | None
) -> Row:
    ratio = ceiling / us
    rate = plan.bytes_per_slot * slots / us / 1e6
    return Row(work=work, us=us, tb_s=rate, ratio=ratio, goal=limit)


def _pend(buffers: GroupBuffers) -> None:
    """Make every record PENDING, without a fingerprint of earlier bytes."""
    buffers.records.zero_()
    buffers.records[:, IDENTITY] = _PENDING


def _complete(buffers: GroupBuffers, plan: FingerprintPlan, slots: torch.Tensor) -> None:
    _pend(buffers)
    complete_slots(_TRITON, buffers, plan, slots)


def _read_us(memory: torch.Tensor) -> float:
    """Microseconds in which the fastest reader reads all of `memory`."""
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return min(device_us(partial(read_all, memory, sink, r, multiprocessors), 7) for r in READERS)
