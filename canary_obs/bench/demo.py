"""`canary-obs bench demo`: paired step times of mode log and mode none."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch

from canary_obs.attach import install_canary
from canary_obs.bench.statistics import compare, exit_code, show
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.demo.reference import build_engine, build_traffic
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.traffic import Traffic
from canary_obs.runtime.canary import CanaryRuntime

_WARMUP_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedPlan:
    """What the command line asked for."""

    blocks: int
    block_steps: int
    seed: int
    json: bool
    shape: str
    device: str
    threads: int


@dataclass(slots=True, kw_only=True)
class _Side:
    engine: Engine
    traffic: Traffic
    canary: CanaryRuntime | None

    def run(self, steps: int) -> float:
        """Seconds spent in `steps` engine steps; both sides see the same load."""
        spent, target = 0.0, self.engine.statistics.steps + steps
        if self.canary is not None:
            self.canary.patrol.rest()  # the other side's block was no time of this engine
        while self.engine.statistics.steps < target:
            self.traffic.advance(self.engine)
            if self.engine.has_work():
                started = time.perf_counter()
                self.engine.step()
                spent += time.perf_counter() - started
        return spent


def run_paired(plan: PairedPlan) -> int:
    """Measures, prints a table (or JSON); returns the exit code."""
    torch.set_num_threads(plan.threads)
    none, log = _side(plan, protected=False), _side(plan, protected=True)
    none.run(_WARMUP_STEPS)
    log.run(_WARMUP_STEPS)
    canary = log.canary
    assert canary is not None, "mode log attaches"
    before = dict(canary.overhead)
    order, pairs = random.Random(plan.seed), []
    for _ in range(plan.blocks):
        first = order.random() < 0.5
        early = (none if first else log).run(plan.block_steps)
        late = (log if first else none).run(plan.block_steps)
        pairs.append((early, late) if first else (late, early))
    result: dict[str, object] = {"shape": plan.shape} | compare(pairs, plan.block_steps, plan.seed)
    steps = plan.blocks * plan.block_steps
    result["overhead_ms"] = {
        hook: round(1e3 * (spent - before[hook]) / steps, 4) for hook, spent in canary.overhead.items()
    }
    violations = result["violations"] = canary.counter_reader.violations
    faults = result["observer_faults"] = dict(canary.health.faults)
    canary.detach()
    show("mode log (defaults) against mode none, interleaved pairs", result, as_json=plan.json)
    return exit_code(violations=violations, observer_faults=faults)


def _side(plan: PairedPlan, *, protected: bool) -> _Side:
    engine = build_engine(plan.shape, plan.device, plan.seed)
    canary = install_canary(engine, CanaryConfig(endpoint=IN_PROCESS)) if protected else None
    if canary is not None:
        canary.mark_ready()
    return _Side(engine=engine, traffic=build_traffic(engine, plan.seed), canary=canary)
