"""`canary-obs bench cpu`: time of each operation of a decode step on the CPU, by backend."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from canary_kernels import layout
from canary_kernels.buffers import GroupBuffers, RowBatch, allocate_buffers, source_from_tensor
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import FingerprintPlan, compare_slots, complete_slots, plan_fingerprint
from canary_kernels.hashing import chain_of
from canary_kernels.layout import Part, Phase, RealData
from canary_kernels.verify import verify_rows
from canary_kernels.write import write_identities
from canary_obs.bench.result import BenchResult, Measure

_PAGE, _HEADS, _HEAD_DIM = 16, 2, 32
_WARMUP = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPlan:
    """A decode step of `requests` requests with `prefix` cached tokens each, repeated `rounds` times."""

    requests: int
    prefix: int
    layers: int  # each with K and V of 128 bytes per slot
    rounds: int
    seed: int


@dataclass(slots=True, kw_only=True)
class _Variant:
    """One backend with its own records and times."""

    backend: Backend
    buffers: GroupBuffers
    plan: FingerprintPlan
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of each operation, step by step

    def step(self, columns: dict[str, Any]) -> None:
        """The operations of one forward, in the runtime's order."""
        self.buffers.clock.add_(1)
        started = time.perf_counter()
        batch = RowBatch(**columns)
        self._record("batch", started)
        self._timed("compare", lambda: compare_slots(*self._target, batch.out_slots, Phase.HEAD))
        self._timed("write", lambda: write_identities(self.backend, self.buffers, batch))
        self._timed("verify_head", lambda: verify_rows(self.backend, self.buffers, batch, Phase.HEAD))
        self._timed("complete", lambda: complete_slots(*self._target, batch.out_slots))
        self._timed("verify_tail", lambda: verify_rows(self.backend, self.buffers, batch, Phase.TAIL))

    @property
    def _target(self) -> tuple[Backend, GroupBuffers, FingerprintPlan]:
        return self.backend, self.buffers, self.plan

    def _timed(self, name: str, call: Callable[[], None]) -> None:
        started = time.perf_counter()
        call()
        self._record(name, started)

    def _record(self, name: str, started: float) -> None:
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)


def run_cpu(plan: CpuPlan) -> BenchResult:
    """Measure both backends, step by step in alternation; medians in microseconds."""
    torch.manual_seed(plan.seed)
    pages = -(-(plan.prefix + 1) // _PAGE)
    table = torch.randperm(plan.requests * pages).view(plan.requests, pages).int()
    tokens = torch.randint(0, 1 << 17, (plan.requests, plan.prefix + 1))
    shape = plan.requests * pages, _PAGE, _HEADS, _HEAD_DIM
    sources = [
        source_from_tensor(torch.randn(shape, dtype=torch.bfloat16), part, layer)
        for layer in range(plan.layers)
        for part in (Part.K, Part.V)
    ]
    fingerprint = plan_fingerprint(sources, RealData.ALL, "cpu")
    variants = [
        _Variant(
            backend=backend,
            plan=fingerprint,
            buffers=allocate_buffers(plan.requests * pages * _PAGE, torch.zeros(1, dtype=torch.int64)),
        )
        for backend in (Backend.NUMBA, Backend.TORCH)
    ]
    prefill, decode = _columns(table, tokens, 0, plan.prefix), _columns(table, tokens, plan.prefix, 1)
    for variant in variants:
        variant.step(prefill)
        for _ in range(_WARMUP):
            variant.step(decode)
        variant.seconds.clear()
    for _ in range(plan.rounds):
        for variant in variants:
            variant.step(decode)
    violations = sum(int(variant.buffers.counters[: layout.NUM_LANES].sum()) for variant in variants)
    figures = {f"{variant.backend.value}_us": _medians(variant.seconds) for variant in variants}
    return BenchResult(
        bench="cpu",
        title="Operations of one decode step, medians",
        plan=asdict(plan),
        figures=figures,
        faults={"violations": violations},
        measures={
            f"{name}, microseconds per step": Measure(value=spent["step"], noise=0.1 * spent["step"])
            for name, spent in figures.items()
        },
    )


def _columns(table: torch.Tensor, tokens: torch.Tensor, prefix: int, extend: int) -> dict[str, Any]:
    """Arguments of a RowBatch in which every request adds `extend` tokens after `prefix` tokens."""
    requests, new = table.shape[0], torch.arange(prefix, prefix + extend)

    def column(value: int) -> torch.Tensor:
        return torch.full((requests,), value, dtype=torch.int32)

    return {
        "slot_table": table, "page_size": _PAGE, "rows": torch.arange(requests), "starts": column(0),
        "prefix_lens": column(prefix), "extend_lens": column(extend),
        "token_starts": torch.arange(requests + 1, dtype=torch.int32) * extend,
        "digests": torch.stack([chain_of(row[:prefix])[-1] for row in tokens]),
        "input_ids": tokens[:, new].flatten().int(), "positions": new.repeat(requests),
        "out_slots": (table[:, new // _PAGE].long() * _PAGE + new % _PAGE).flatten(),
    }  # fmt: skip


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    medians = {name: round(1e6 * statistics.median(spent), 1) for name, spent in seconds.items()}
    steps = [sum(spent) for spent in zip(*seconds.values(), strict=True)]
    return medians | {"step": round(1e6 * statistics.median(steps), 1)}
