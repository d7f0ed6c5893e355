"""One decode step of a loaded reference engine, repeated with and without the canary, for GPU benches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from canary_kernels import layout
from canary_obs.attach import install_canary
from canary_obs.bench.result import BenchResult, Measure
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.execution.runner import Runner
from canary_obs.reference_engine.model.shapes import ModelShape
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import EngineConfig
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.device.byte_address import locate_byte

SHAPES = {
    "8b": ModelShape(
        vocab_size=128256, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336
    ),
    "small": ModelShape(
        vocab_size=8192, hidden=1024, layers=8, heads=16, kv_heads=4, head_dim=64, intermediate=2816
    ),
}
_MARGIN = 64  # tokens beyond the context
_PREFILL_TOKENS = 8192
_DRAIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A decode batch, and how often it is repeated."""

    shape: str
    requests: int
    context: int  # tokens of each request
    rounds: int
    block_steps: int


class RepeatedStep:
    """An engine whose requests all decode, with a canary attached; needs a GPU."""

    def __init__(self, plan: StepPlan, **settings: Any) -> None:
        """Fill the engine. `settings` are fields of CanaryConfig. Raises ConfigurationError without a GPU."""
        if not torch.cuda.is_available():
            raise ConfigurationError("--device", "cpu", "this bench replays CUDA graphs", "Run it on a GPU.")
        self._plan = plan
        self.engine = _engine(plan)
        self._adapter = ReferenceAdapter(self.engine)
        config = CanaryConfig(**{"endpoint": IN_PROCESS, "idle_sweep": False, **settings})
        canary = install_canary(self._adapter, config)
        assert canary is not None, "mode log attaches"
        self.canary: CanaryRuntime = canary
        self.canary.mark_ready()
        runner = self.engine.runner
        self._add_requests()
        self.prefill: ForwardBatch = runner.prepare(self.engine.scheduler.schedule())
        started = time.perf_counter()
        # The same step then serves every block: rewriting a slot with its own token is no violation.
        while self.engine.scheduler.waiting or any(r.remaining > 1 for r in self.engine.scheduler.running):
            self.engine.step()
        self._prefill_seconds = time.perf_counter() - started
        self.decode: ForwardBatch = runner.prepare(self.engine.scheduler.schedule())
        self._observed_forward: Callable[[ForwardBatch], torch.Tensor] = vars(runner)["forward"]
        self._plain_forward: Callable[[ForwardBatch], torch.Tensor] = Runner.forward.__get__(runner)
        # One entry per observed step.
        self.after_step_us: list[float] = []
        self.hooks_us: list[float] = []  # of all hooks together
        self.tasks: list[str] = []  # which task after_step ran
        self.lag_steps: list[int] = []  # age of the newest host copy of the counters

    def clear_measurements(self) -> None:
        """Forget what earlier blocks measured."""
        for measured in (self.after_step_us, self.hooks_us, self.tasks, self.lag_steps):
            measured.clear()

    def block(
        self, steps: int, *, observed: bool, wait: bool, ahead: int = 2, batch: ForwardBatch | None = None
    ) -> float:
        """Milliseconds per step of `batch` (default: the decode batch), with or without the canary.

        With `wait` the engine waits for the tokens of each step, otherwise it runs `ahead` steps ahead.
        """
        batch = self.decode if batch is None else batch
        if observed:
            self.canary.patrol.skip_time()
        forward = self._observed_forward if observed else self._plain_forward
        torch.cuda.synchronize()
        marks: deque[torch.cuda.Event] = deque()
        started = time.perf_counter()
        with as_scheduled(batch):
            for _ in range(steps):
                self.engine.statistics.forwards += observed  # as the engine's own loop would count
                spent = sum(self.canary.overhead.values())
                logits = forward(batch)
                if observed:  # where the adapter calls it: before the engine waits for the tokens
                    self._after_step(spent)
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

    def _after_step(self, spent_before: float) -> None:
        started = time.perf_counter()
        self._adapter.after_step()
        self.after_step_us.append(1e6 * (time.perf_counter() - started))
        self.tasks.append(self.canary.run.last_task)
        self.hooks_us.append(1e6 * (sum(self.canary.overhead.values()) - spent_before))
        self.lag_steps.append(self.canary.counter_reader.status(self.canary.step, started).lag_steps)

    def patrolled_bytes(self) -> int:
        """Bytes that the patrol has compared on the side stream; waits for the device."""
        counters = self.canary.state.side_counters.view(-1, layout.COUNTER_WORDS).tolist()
        return sum(
            row[layout.COUNT_HASHED + layout.Phase.PATROL] * group.plan.bytes_per_slot
            for row, group in zip(counters, self.canary.state.groups, strict=True)
        )

    def facts(self) -> dict[str, Any]:
        """Settings, for the result."""
        return {
            "patrol_budget_bytes_per_second": round(self.canary.patrol.bytes_per_second),
            "prefill_seconds": round(self._prefill_seconds, 3),
        }

    def finish(
        self, bench: str, title: str, figures: dict[str, Any], measures: dict[str, Measure]
    ) -> BenchResult:
        """Inject a bit flip, detach; the figures count only if it was counted once and nothing failed."""
        flip_counted_once = self._counts_flip_once()
        faults = dict(self.canary.health.faults)
        self.canary.detach()
        figures |= {"injected_flip_counted_once": flip_counted_once, "observer_faults": faults}
        return BenchResult(
            bench=bench,
            title=title,
            plan=asdict(self._plan),
            measures=measures,
            figures=figures,
            faults={"observer_faults": faults, "flip_not_counted_once": not flip_counted_once},
        )

    def _counts_flip_once(self) -> bool:
        """Whether one flipped bit is counted as one violation, and was the only one."""
        canary = self.canary
        violations_before = self._violations_after_a_cycle()
        address = locate_byte(canary.state.groups[0].view.sources[7], int(self.decode.out_slots[3]), 77)
        address.flip(4)
        violations = self._violations_after_a_cycle()
        address.flip(4)
        return (violations_before, violations) == (0, 1)

    def _violations_after_a_cycle(self) -> int:
        self.canary.patrol.whole_cycle()
        self.canary.counter_reader.drain(self.canary.step, _DRAIN_SECONDS)
        return self.canary.counter_reader.violations

    def _add_requests(self) -> None:
        draw = np.random.default_rng(0)
        vocabulary = self.engine.config.shape.vocab_size
        for _ in range(self._plan.requests):
            prompt = draw.integers(3, vocabulary, self._plan.context).astype(np.int32)
            self.engine.add_request(prompt, Sampling(max_tokens=_MARGIN, stop_at_eos=False))


@contextmanager
def as_scheduled(batch: ForwardBatch) -> Iterator[None]:
    """Within it, the batch's requests have computed as many tokens as when the batch was prepared."""
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
