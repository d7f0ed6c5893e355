"""`canary-obs bench step|patrol`: what the canary adds to a decode step of an 8B-shaped engine."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from canary_kernels import layout
from canary_obs.attach import install_canary
from canary_obs.bench.gpu_facts import environment
from canary_obs.bench.statistics import compared, exit_code
from canary_obs.config import IN_PROCESS, CanaryConfig, parse_patrol_budget
from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.runner import ForwardBatch, Runner
from canary_obs.reference_engine.model.llama import ModelShape
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import EngineConfig
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.patrol.patrol import Patrol

SHAPES = {
    "8b": ModelShape(
        vocab_size=128256, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336
    ),
    "small": ModelShape(
        vocab_size=8192, hidden=1024, layers=8, heads=16, kv_heads=4, head_dim=64, intermediate=2816
    ),
}
_MARGIN = 64  # tokens beyond the context
_PREFILL_TOKENS, _PREFILL_ROUNDS = 8192, 8
_BUDGETS = ("1%", "1GB/s", "5GB/s", "15GB/s", "50GB/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the command line asked for."""

    shape: str
    requests: int
    context: int
    rounds: int
    block_steps: int
    output: Path | None


class Stage:
    """One decode step of a loaded engine, repeated at will with and without the canary."""

    def __init__(self, plan: StepPlan, **settings: Any) -> None:
        if not torch.cuda.is_available():
            raise ConfigurationError("--device", "cpu", "this bench replays CUDA graphs", "Run it on a GPU.")
        self.engine = _engine(plan)
        self._adapter = ReferenceAdapter(self.engine)
        config = CanaryConfig(**{"endpoint": IN_PROCESS, "idle_sweep": False, **settings})
        canary = install_canary(self._adapter, config)
        assert canary is not None
        self.canary: CanaryRuntime = canary
        self.canary.mark_ready()
        runner = self.engine.runner
        self._queue(plan)
        self.prefill: ForwardBatch = runner.prepare(self.engine.scheduler.schedule())
        started = time.perf_counter()
        # The same step then serves every block: rewriting a slot with its own token is no violation.
        while self.engine.scheduler.waiting or any(r.remaining > 1 for r in self.engine.scheduler.running):
            self.engine.step()
        self.prefill_seconds = time.perf_counter() - started
        self.decode: ForwardBatch = runner.prepare(self.engine.scheduler.schedule())
        self._observed: Callable[[ForwardBatch], torch.Tensor] = vars(runner)["forward"]
        self._plain: Callable[[ForwardBatch], torch.Tensor] = Runner.forward.__get__(runner)
        self.after_step_us: list[float] = []
        self.hooks_us: list[float] = []  # of all hooks of a step together
        self.turns: list[str] = []  # what each of these calls had time for
        self.lag_steps: list[int] = []  # of the newest host copy of the counters, after each of these calls

    def _queue(self, plan: StepPlan) -> None:
        draw = np.random.default_rng(0)
        vocabulary = self.engine.config.shape.vocab_size
        for _ in range(plan.requests):
            prompt = draw.integers(3, vocabulary, plan.context).astype(np.int32)
            self.engine.add_request(prompt, Sampling(max_tokens=_MARGIN, stop_at_eos=False))

    def block(
        self, steps: int, *, observed: bool, wait: bool, ahead: int = 2, batch: ForwardBatch | None = None
    ) -> float:
        """Milliseconds per step of a batch, by default the decode batch.

        The engine waits for each step's tokens, or runs `ahead` steps ahead.
        """
        batch = self.decode if batch is None else batch
        if observed:
            self.canary.patrol.rest()
        forward = self._observed if observed else self._plain
        torch.cuda.synchronize()
        marks: deque[torch.cuda.Event] = deque()
        started = time.perf_counter()
        with as_scheduled(batch):
            for _ in range(steps):
                spent = sum(self.canary.overhead.values())
                logits = forward(batch)
                if observed:  # where the adapter calls it: ahead of the wait for the tokens
                    began = time.perf_counter()
                    self._adapter.after_step()
                    self.after_step_us.append(1e6 * (time.perf_counter() - began))
                    self.turns.append(self.canary.last_turn)
                    self.hooks_us.append(1e6 * (sum(self.canary.overhead.values()) - spent))
                    self.lag_steps.append(
                        self.canary.counter_reader.status(self.canary.step, began).lag_steps
                    )
                tokens = logits.argmax(dim=-1)
                if wait:
                    tokens.tolist()
                else:
                    marks.append(torch.cuda.current_stream().record_event())
                    if len(marks) > ahead:
                        marks.popleft().synchronize()
        # Not the whole device: the patrol may still be reading, and no engine waits for that.
        torch.cuda.current_stream().synchronize()
        return 1e3 * (time.perf_counter() - started) / steps

    @property
    def patrolled_bytes(self) -> int:
        """Bytes that the patrol has compared beside the forwards."""
        counted = self.canary.state.beside.view(-1, layout.COUNTER_WORDS).tolist()  # waits for the device
        return sum(
            row[layout.COUNT_HASHED + layout.Phase.PATROL] * group.plan.bytes_per_slot
            for row, group in zip(counted, self.canary.state.groups, strict=True)
        )

    def caught(self) -> bool:
        """Whether a planted bit flip is counted, once, and nothing else is."""
        canary = self.canary
        canary.patrol.whole_cycle()
        canary.counter_reader.drain(canary.step, 30.0)
        clean = canary.counter_reader.violations
        address = locate_byte(canary.state.groups[0].view.sources[7], int(self.decode.out_slots[3]), 77)
        address.flip(4)
        canary.patrol.whole_cycle()
        canary.counter_reader.drain(canary.step, 30.0)
        address.flip(4)
        return clean == 0 and canary.counter_reader.violations == 1


@contextmanager
def as_scheduled(batch: ForwardBatch) -> Iterator[None]:
    """While entered, the batch's requests have computed what they had when it was prepared."""
    computed = [request.computed for request in batch.requests]
    for request, prefix in zip(batch.requests, batch.prefixes, strict=True):
        request.computed = prefix
    try:
        yield
    finally:
        for request, count in zip(batch.requests, computed, strict=True):
            request.computed = count


def _engine(plan: StepPlan) -> Engine:
    if plan.shape not in SHAPES:
        raise ConfigurationError("--shape", plan.shape, "no such shape", f"Use {' or '.join(SHAPES)}.")
    context = plan.context + _MARGIN
    return Engine(
        EngineConfig(
            shape=SHAPES[plan.shape], num_slots=(plan.requests + 1) * context, max_running=plan.requests,
            max_context=context, token_budget=max(_PREFILL_TOKENS, 2 * plan.requests),
            dtype=torch.bfloat16, device="cuda",
        )
    )  # fmt: skip


def run_step(plan: StepPlan) -> int:
    """Interleaved blocks without the canary, with its checks, and with checks and patrol."""
    stage = Stage(plan)
    patrol, result = stage.canary.patrol, facts_of(plan, stage)
    for wait in (False, True):
        times: dict[str, list[float]] = {"none": [], "checks": [], "checks_and_patrol": []}
        read = seconds = 0.0
        spent, steps = dict(stage.canary.overhead), stage.canary.step
        for round_number in range(plan.rounds + 1):
            for name, found in times.items():
                patrol.enabled = name == "checks_and_patrol"
                before = stage.patrolled_bytes
                taken = stage.block(plan.block_steps, observed=name != "none", wait=wait)
                if round_number:  # the first round warms up
                    found.append(taken)
                    read += stage.patrolled_bytes - before if patrol.enabled else 0
                    seconds += taken * plan.block_steps / 1e3 if patrol.enabled else 0.0
        kind = "engine_waits_each_step" if wait else "engine_runs_ahead"
        steps = stage.canary.step - steps
        result[kind] = compared(times) | {
            "patrol_gb_s": round(read / seconds / 1e9, 2),
            "host_us": {
                hook: round(1e6 * (total - spent[hook]) / steps, 1)
                for hook, total in stage.canary.overhead.items()
            },
        }
    result["prefill"] = _prefill(stage)
    return finish(plan, stage, result)


def _prefill(stage: Stage) -> dict[str, float]:
    """A prefill step again and again, engine waiting: without the canary, and at its defaults."""
    times: dict[str, list[float]] = {"none": [], "checks_and_patrol": []}
    stage.canary.patrol.enabled = True
    for round_number in range(_PREFILL_ROUNDS + 1):
        for name, found in times.items():
            taken = stage.block(1, observed=name != "none", wait=True, batch=stage.prefill)
            if round_number:
                found.append(taken)
    return {"tokens": float(sum(stage.prefill.extends)), **compared(times)}


def run_patrol(plan: StepPlan) -> int:
    """Step time against patrol bandwidth, for budgets from nothing to all there is."""
    stage = Stage(plan)
    result = facts_of(plan, stage)
    default = stage.canary.patrol
    rows: dict[str, dict[str, float]] = {}
    for budget in _BUDGETS:
        stage.canary.patrol = Patrol(
            stage.canary.state,
            stage.canary.health,
            parse_patrol_budget(budget),
            100 * default.bytes_per_second,
            stage.canary.counter_reader,
        )
        times: dict[str, list[float]] = {"checks": [], "checks_and_patrol": []}
        read = seconds = 0.0
        for _ in range(plan.rounds):
            for name, found in times.items():
                stage.canary.patrol.enabled = name == "checks_and_patrol"
                before = stage.patrolled_bytes
                found.append(stage.block(plan.block_steps, observed=True, wait=False))
                if stage.canary.patrol.enabled:
                    read += stage.patrolled_bytes - before
                    seconds += found[-1] * plan.block_steps / 1e3
        rows[budget] = compared(times) | {"patrol_gb_s": round(read / seconds / 1e9, 2)}
    result["by_budget"] = rows
    stage.canary.patrol = default
    return finish(plan, stage, result)


def facts_of(plan: StepPlan, stage: Stage) -> dict[str, Any]:
    """What every one of these benches says of itself."""
    return {
        "environment": environment(),
        "shape": plan.shape,
        "requests": plan.requests,
        "context": plan.context,
        "rounds": plan.rounds,
        "block_steps": plan.block_steps,
        "patrol_budget_bytes_per_second": round(stage.canary.patrol.bytes_per_second),
        "prefill_seconds": round(stage.prefill_seconds, 3),
    }


def finish(plan: StepPlan, stage: Stage, result: dict[str, Any]) -> int:
    """Plants a flip, tells all; returns the exit code: 1 when the canary failed, missed it or saw others."""
    counted = result["planted_flip_counted_once"] = stage.caught()
    faults = result["observer_faults"] = dict(stage.canary.health.faults)
    stage.canary.detach()
    tell(plan, result)
    return exit_code(observer_faults=faults, flip_not_counted_once=not counted)


def tell(plan: StepPlan, result: dict[str, Any]) -> None:
    """As a table, as a line of JSON, and into the file that was asked for."""
    table = Table("figure", "value")
    for name, value in result.items():
        table.add_row(name, json.dumps(value, indent=1) if isinstance(value, dict) else str(value))
    Console(file=sys.stderr).print(table)
    sys.stdout.write(json.dumps(result) + "\n")
    if plan.output is not None:
        plan.output.write_text(json.dumps(result, indent=1) + "\n")
