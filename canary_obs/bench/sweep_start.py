"""`canary-obs bench sweep-start`: what the walk of a sweep over vLLM's prefix cache costs a step."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict, dataclass

from canary_obs.bench.result import BenchResult, Measure
from canary_obs.config import CanaryConfig
from canary_obs.engine_api.walks import CachedWalk
from canary_obs.engines.vllm.cache_count import BlockCounts
from canary_obs.engines.vllm.cached_blocks import CachedBlocks
from canary_obs.engines.vllm.pool_events import PublishedRun

_CHUNK = 4096  # slots, as the sweeper takes them on a GPU
_RUN = 512  # blocks that a request publishes at once


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStartPlan:
    """The cache that is walked, and how often."""

    slots: int
    block_size: int
    rounds: int
    seed: int


def run_sweep_start(plan: SweepStartPlan) -> BenchResult:
    """Walk a cache whose blocks were published in random order: its start, each part, and all at once.

    `goal`: the default of `sweep_budget_ms`, which a step spends on a sweep.
    """
    blocks = _cache(plan)
    starts, parts, whole = list[float](), list[float](), list[float]()
    walked = owed = 0
    for _ in range(plan.rounds):
        started = time.perf_counter()
        walk = blocks.walk("full")
        owed += walk.total
        starts.append(time.perf_counter() - started)
        walked += _take_all(walk, blocks, parts)
        started = time.perf_counter()
        blocks.cached("full", unlocked_only=False)
        whole.append(time.perf_counter() - started)
    budget = CanaryConfig().sweep_budget_ms
    start, longest = 1e3 * statistics.median(starts), 1e3 * statistics.median(sorted(parts)[-plan.rounds :])
    return BenchResult(
        bench="sweep-start",
        title="Milliseconds of an engine's step that the walk of a sweep takes",
        plan=asdict(plan),
        figures={
            "start_ms": round(start, 3),
            "part_ms": round(1e3 * statistics.median(parts), 3),
            "longest_part_ms": round(longest, 3),
            "parts": len(parts) // plan.rounds,
            "all_at_once_ms": round(1e3 * statistics.median(whole), 3),
        },
        faults={"slots_missed": owed - walked or plan.rounds * plan.slots - walked},
        measures={
            "start, milliseconds": Measure(value=round(start, 3), noise=0.5 * start, goal=budget),
            "longest part, milliseconds": Measure(value=round(longest, 3), noise=0.5 * longest),
        },
    )


def _cache(plan: SweepStartPlan) -> CachedBlocks:
    count = plan.slots // plan.block_size
    blocks = CachedBlocks({"full": (0, count + 1, plan.block_size)}, lambda _: set(), empty=True)
    order = random.Random(plan.seed).sample(range(1, count + 1), count)
    runs = [tuple(order[first : first + _RUN]) for first in range(0, count, _RUN)]
    blocks.apply([PublishedRun(0, run, 0, -1, plan.block_size) for run in runs], [BlockCounts(count, 0)])
    return blocks


def _take_all(walk: CachedWalk, blocks: CachedBlocks, seconds: list[float]) -> int:
    """Slots of a walk; appends the seconds of each part, with the question what is cached still."""
    walked = 0
    while True:
        started = time.perf_counter()
        part = walk.take(_CHUNK)
        if not part.slots.numel():
            return walked
        blocks.still_cached("full", part.slots)
        blocks.still_cached("full", part.previous.clamp(min=0))
        seconds.append(time.perf_counter() - started)
        walked += part.slots.numel()
