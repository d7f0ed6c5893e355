"""`canary-obs bench vllm`: step times of a tiny vLLM with the canary attached and detached, in pairs."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.bench.result import BenchResult
from canary_obs.bench.statistics import overhead_measure, paired_overhead
from canary_obs.bench.vllm_canary import attached, detach
from canary_obs.config import IN_PROCESS
from canary_obs.demo.in_process_vllm import TINY_CONTEXT, InProcessVllm, tiny_vllm
from canary_obs.runtime.canary import CanaryRuntime


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPlan:
    """Number and length of the blocks, and the decode batch."""

    blocks: int  # pairs of them
    block_steps: int
    requests: int
    prompt: int  # tokens
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Seconds of one block's timed steps, and of their parts."""

    seconds: float
    schedule: float  # vLLM's scheduler, with or without our block events
    execute: float  # the worker's execute_model, with or without the canary's hooks
    hooks: dict[str, float]  # the canary's own account, by hook
    violations: int
    faults: int


def run_vllm(plan: VllmPlan) -> BenchResult:
    """Run the same requests in every block, with and without the canary; decode steps are timed."""
    os.environ |= {"KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": IN_PROCESS}
    blocks: list[tuple[_Block, _Block]] = []
    with TemporaryDirectory() as folder:
        block = _BlockRunner(tiny_vllm(Path(folder), plan.requests, plan.seed), plan)
        draw = random.Random(plan.seed)
        for _ in range(plan.blocks + 1):
            order = [False, True] if draw.random() < 0.5 else [True, False]
            pair = {protected: block.run(protected=protected) for protected in order}
            blocks.append((pair[False], pair[True]))
        block.vllm.shutdown()
    del blocks[0]  # the first pair warms up
    pairs = [(none.seconds, log.seconds) for none, log in blocks]
    faults = {
        "violations": sum(log.violations for _, log in blocks),
        "observer_faults": sum(log.faults for _, log in blocks),
    }
    figures = paired_overhead(pairs, plan.block_steps, plan.seed) | _added_by_part(blocks, plan.block_steps)
    return BenchResult(
        bench="vllm",
        title="vLLM, mode log (defaults) against no canary, interleaved pairs",
        plan=asdict(plan),
        figures=figures,
        faults=dict(faults),
        measures={"overhead": overhead_measure(figures)},
    )


def _added_by_part(blocks: list[tuple[_Block, _Block]], steps: int) -> dict[str, object]:
    """Where a step's additional milliseconds are spent: medians over pairs, which need not add up exactly."""

    def added(spent: Callable[[_Block], float]) -> float:
        return statistics.median(spent(log) - spent(none) for none, log in blocks)

    parts = {hook: statistics.median(log.hooks[hook] for _, log in blocks) for hook in blocks[0][1].hooks}
    hooks = sum(parts.values())
    parts["scheduler"] = added(lambda block: block.schedule)
    # Not in our code, but caused by it: caches that our work displaced, threads that wait.
    parts["execute_model beyond hooks"] = added(lambda block: block.execute) - hooks
    parts["elsewhere"] = added(lambda block: block.seconds - block.schedule - block.execute)
    none = statistics.median(block.seconds for block, _ in blocks)
    return {
        "added_ms": round(1e3 * added(lambda block: block.seconds) / steps, 4),
        "added_ms_by_part": {part: round(1e3 * spent / steps, 4) for part, spent in parts.items()},
        "added_share_by_part": {part: round(spent / none, 4) for part, spent in parts.items()},
    }


class _BlockRunner:
    """Runs blocks on one engine; measures the time in its scheduler and in its worker."""

    def __init__(self, vllm: InProcessVllm, plan: VllmPlan) -> None:
        detach(vllm)
        self.vllm, self._plan = vllm, plan
        self._prompts = vllm.random_prompts(plan.requests, plan.prompt)
        self._spent = {"schedule": 0.0, "execute_model": 0.0}  # seconds since the engine was made
        for owner, name in ((vllm.core.scheduler, "schedule"), (vllm.worker, "execute_model")):
            setattr(owner, name, self._timed(owner, name))

    def run(self, *, protected: bool) -> _Block:
        """One block, from an empty prefix cache."""
        if not protected:
            self.vllm.core.reset_prefix_cache()
            return self._measure(None)
        with attached(self.vllm) as (canary, _):
            return self._measure(canary)

    def _measure(self, canary: CanaryRuntime | None) -> _Block:
        vllm, plan = self.vllm, self._plan
        prefill_steps = -(-plan.requests * plan.prompt // TINY_CONTEXT) + 2
        vllm.add_requests(self._prompts, plan.block_steps + 2 * prefill_steps)
        vllm.run_steps(prefill_steps)
        before, hooks_before = dict(self._spent), dict(canary.overhead) if canary else {}
        seconds = vllm.run_steps(plan.block_steps)
        spent = {name: total - before[name] for name, total in self._spent.items()}
        hooks = dict(canary.overhead) if canary else {}
        vllm.run()
        return _Block(
            seconds=seconds, schedule=spent["schedule"], execute=spent["execute_model"],
            hooks={hook: total - hooks_before.get(hook, 0.0) for hook, total in hooks.items()},
            violations=canary.counter_reader.violations if canary else 0,
            faults=canary.health.faults.total() if canary else 0,
        )  # fmt: skip

    def _timed(self, owner: Any, name: str) -> Callable[..., Any]:
        def method(*given: Any, **named: Any) -> Any:
            started = time.perf_counter()
            # Looked up on the class in each call: the plugin wraps it and restores it.
            result = getattr(type(owner), name)(owner, *given, **named)
            self._spent[name] += time.perf_counter() - started
            return result

        return method
