"""`canary-obs bench cpu`: what each operation of a decode step takes on the CPU, by either backend."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
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
from canary_obs.bench.statistics import exit_code, show

_PAGE, _HEADS, _HEAD_DIM = 16, 2, 32
_WARMUP = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPlan:
    """What the command line asked for."""

    requests: int
    prefix: int
    layers: int
    rounds: int
    seed: int
    json: bool


@dataclass(slots=True, kw_only=True)
class _Side:
    """One backend with records and times of its own."""

    backend: Backend
    buffers: GroupBuffers
    plan: FingerprintPlan
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def step(self, shown: dict[str, Any]) -> None:
        """One forward's operations, as the runtime calls them."""
        self.buffers.clock.add_(1)
        started = time.perf_counter()
        batch = RowBatch(**shown)
        self._took("batch", started)
        self._timed("compare", lambda: compare_slots(*self._held, batch.out_slots, Phase.HEAD))
        self._timed("write", lambda: write_identities(self.backend, self.buffers, batch))
        self._timed("verify_head", lambda: verify_rows(self.backend, self.buffers, batch, Phase.HEAD))
        self._timed("complete", lambda: complete_slots(*self._held, batch.out_slots))
        self._timed("verify_tail", lambda: verify_rows(self.backend, self.buffers, batch, Phase.TAIL))

    @property
    def _held(self) -> tuple[Backend, GroupBuffers, FingerprintPlan]:
        return self.backend, self.buffers, self.plan

    def _timed(self, name: str, call: Callable[[], None]) -> None:
        started = time.perf_counter()
        call()
        self._took(name, started)

    def _took(self, name: str, started: float) -> None:
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)


def run_cpu(plan: CpuPlan) -> int:
    """Measures both backends in turn, prints a table (or JSON); returns the exit code."""
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
    memory = plan_fingerprint(sources, RealData.ALL, "cpu")
    sides = [
        _Side(
            backend=backend,
            plan=memory,
            buffers=allocate_buffers(plan.requests * pages * _PAGE, torch.zeros(1, dtype=torch.int64)),
        )
        for backend in (Backend.NUMBA, Backend.TORCH)
    ]
    decode = _shown(table, tokens, plan.prefix, 1)
    for side in sides:
        side.step(_shown(table, tokens, 0, plan.prefix))
        for _ in range(_WARMUP):
            side.step(decode)
        side.seconds.clear()
    for _ in range(plan.rounds):
        for side in sides:
            side.step(decode)
    figures: dict[str, object] = {f"{side.backend.value}_us": _medians(side.seconds) for side in sides}
    figures["violations"] = sum(int(side.buffers.counters[: layout.NUM_LANES].sum()) for side in sides)
    asked = {each.name: getattr(plan, each.name) for each in fields(plan) if each.name != "json"}
    show("Operations of one decode step, medians", asked | figures, as_json=plan.json)
    return exit_code(violations=figures["violations"])


def _shown(table: torch.Tensor, tokens: torch.Tensor, prefix: int, extend: int) -> dict[str, Any]:
    """A batch's arguments: every request adds `extend` tokens after `prefix`."""
    requests, new = table.shape[0], torch.arange(prefix, prefix + extend)

    def every(value: int) -> torch.Tensor:
        return torch.full((requests,), value, dtype=torch.int32)

    return {
        "slot_table": table, "page_size": _PAGE, "rows": torch.arange(requests), "starts": every(0),
        "prefix_lens": every(prefix), "extend_lens": every(extend),
        "token_starts": torch.arange(requests + 1, dtype=torch.int32) * extend,
        "digests": torch.stack([chain_of(row[:prefix])[-1] for row in tokens]),
        "input_ids": tokens[:, new].flatten().int(), "positions": new.repeat(requests),
        "out_slots": (table[:, new // _PAGE].long() * _PAGE + new % _PAGE).flatten(),
    }  # fmt: skip


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    found = {name: round(1e6 * statistics.median(taken), 1) for name, taken in seconds.items()}
    steps = [sum(taken) for taken in zip(*seconds.values(), strict=True)]
    return found | {"step": round(1e6 * statistics.median(steps), 1)}
