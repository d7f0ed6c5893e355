"""`canary-obs bench demo`: step times of the reference engine in mode log and in mode none, in pairs."""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from canary_obs.attach import install_canary
from canary_obs.bench.result import BenchResult
from canary_obs.bench.statistics import overhead_measure, paired_overhead
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.demo.reference import build_engine, build_traffic
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.traffic import Traffic
from canary_obs.runtime.canary import CanaryRuntime

_WARMUP_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedPlan:
    """Number and length of the blocks, and the engine to measure."""

    blocks: int  # pairs of them
    block_steps: int
    seed: int
    shape: str
    device: str
    threads: int


@dataclass(slots=True, kw_only=True)
class _Variant:
    engine: Engine
    traffic: Traffic
    canary: CanaryRuntime | None

    def run(self, steps: int) -> float:
        """Seconds spent in `steps` engine steps; both variants receive the same load."""
        spent, target = 0.0, self.engine.statistics.steps + steps
        if self.canary is not None:
            self.canary.patrol.skip_time()  # no budget for the time of the other variant's block
        while self.engine.statistics.steps < target:
            self.traffic.advance(self.engine)
            if self.engine.has_work():
                started = time.perf_counter()
                self.engine.step()
                spent += time.perf_counter() - started
        return spent


def run_paired(plan: PairedPlan) -> BenchResult:
    """Run blocks of both modes in random order, pair by pair."""
    torch.set_num_threads(plan.threads)
    none, log = _variant(plan, protected=False), _variant(plan, protected=True)
    none.run(_WARMUP_STEPS)
    log.run(_WARMUP_STEPS)
    canary = log.canary
    assert canary is not None, "mode log attaches"
    before = dict(canary.overhead)
    order, pairs = random.Random(plan.seed), []
    for _ in range(plan.blocks):
        none_first = order.random() < 0.5
        first = (none if none_first else log).run(plan.block_steps)
        second = (log if none_first else none).run(plan.block_steps)
        pairs.append((first, second) if none_first else (second, first))
    steps = plan.blocks * plan.block_steps
    violations, faults = canary.counter_reader.violations, dict(canary.health.faults)
    figures: dict[str, Any] = paired_overhead(pairs, plan.block_steps, plan.seed)
    figures |= {
        "overhead_ms": {
            hook: round(1e3 * (spent - before[hook]) / steps, 4) for hook, spent in canary.overhead.items()
        },
    }
    canary.detach()
    return BenchResult(
        bench="demo",
        title="mode log (defaults) against mode none, interleaved pairs",
        plan=asdict(plan),
        figures=figures,
        faults={"violations": violations, "observer_faults": faults},
        measures={"overhead": overhead_measure(figures)},
    )


def _variant(plan: PairedPlan, *, protected: bool) -> _Variant:
    engine = build_engine(plan.shape, plan.device, plan.seed)
    canary = install_canary(engine, CanaryConfig(endpoint=IN_PROCESS)) if protected else None
    if canary is not None:
        canary.mark_ready()
    return _Variant(engine=engine, traffic=build_traffic(engine, plan.seed), canary=canary)
