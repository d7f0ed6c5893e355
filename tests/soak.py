"""False-alarm soak over every kind of model: python -m tests.soak --checks 100000000 --output soak.json.

Traffic with abort storms and random eviction pressure on the CPU, sweeps and patrol beside it, no fault.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from canary_kernels import layout
from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.engines.reference.engine import Engine
from canary_obs.engines.reference.settings import MODELS, tiny, with_model
from canary_obs.engines.reference.traffic import Traffic, scaled_traffic

SIZES = {"max_context": 1024, "num_slots": 8192, "max_running": 12, "token_budget": 256}
STORM, PRESSURE = 0.01, 0.05  # probabilities per step
BATCH = 100  # steps between looks at the counters


@dataclass(frozen=True, slots=True, kw_only=True)
class KindReport:
    """One kind of model under traffic. Checks are of slots: records by the chain, bytes by their hash."""

    model: str
    steps: int
    seconds: float
    records_checked: int
    bytes_checked: int
    unverified: int
    violations: int
    sweep_passes: int
    evictions: int
    preemptions: int
    aborts: int
    storms: int
    state: str
    observer_faults: int


def soak(model: str, checks: int, seed: int = 1, sizes: dict[str, int] | None = None) -> KindReport:
    """Run one kind until this many records were checked."""
    engine = Engine(with_model(tiny(seed=seed, **(SIZES if sizes is None else sizes)), model))
    config = CanaryConfig(
        endpoint=IN_PROCESS, sweep_interval=100, patrol_budget="2%", prefix_data=False, write_history=False
    )
    canary = install_canary(engine, config)
    assert canary is not None
    canary.mark_ready()
    draw = np.random.default_rng(seed)
    traffic = Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), seed)
    storms, started, checked = 0, time.monotonic(), 0
    while checked < checks:
        for _ in range(BATCH):
            traffic.advance(engine)
            storms += _disturb(engine, draw)
            if engine.has_work():
                engine.step()
        counters = canary.state.counters.view(-1, layout.COUNTER_WORDS)  # on the CPU: no copy, no wait
        checked = int(counters[:, layout.COUNT_VERIFIED : layout.COUNT_VERIFIED + layout.NUM_PHASES].sum())
    canary.check_everything()
    state = canary.verdict()[0]
    final, statistics = canary.detach(), engine.statistics
    groups = final.groups.values()
    return KindReport(
        model=model,
        steps=statistics.steps,
        seconds=round(time.monotonic() - started, 1),
        records_checked=sum(sum(group.verified.values()) for group in groups),
        bytes_checked=sum(sum(group.hashed.values()) for group in groups),
        unverified=sum(sum(group.unverified.values()) for group in groups),
        violations=sum(sum(sum(by.values()) for by in group.violations.values()) for group in groups),
        sweep_passes=sum(final.sweep_passes.values()),
        evictions=statistics.evictions,
        preemptions=statistics.preemptions,
        aborts=statistics.aborts,
        storms=storms,
        state=state.value,
        observer_faults=sum(final.observer_faults.values()),
    )


def _disturb(engine: Engine, draw: np.random.Generator) -> int:
    """Now and then abort most of what there is, or evict a part of the cache; returns the storms."""
    if draw.random() < PRESSURE:
        pages = int(draw.integers(1, 1 + engine.config.num_slots // engine.config.page_size // 2))
        taken = engine.scheduler.take(pages)
        if taken is not None:
            engine.scheduler.allocator.free(taken)
    if draw.random() >= STORM:
        return 0
    for request in engine.unfinished:
        if draw.random() < 0.8:
            engine.abort(request.id)
    return 1


def report(kinds: Iterable[KindReport]) -> dict[str, object]:
    """Totals with the upper 95 % confidence bound on the rate of false alarms (rule of three)."""
    kinds = list(kinds)
    checks = sum(kind.records_checked + kind.bytes_checked for kind in kinds)
    return {
        "slot_checks": checks,
        "records_checked": sum(kind.records_checked for kind in kinds),
        "bytes_checked": sum(kind.bytes_checked for kind in kinds),
        "false_alarms": sum(kind.violations for kind in kinds),
        "upper_bound_95": 3 / checks,
        "seconds": round(sum(kind.seconds for kind in kinds), 1),
        "kinds": [asdict(kind) for kind in kinds],
    }


def main() -> int:
    """Exit code 1 when anything was reported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks", type=int, default=2_000_000, help="records to check, over all kinds")
    parser.add_argument("--model", choices=sorted(MODELS), action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    models = options.model or list(MODELS)
    kinds = []
    for model in models:
        kinds.append(soak(model, options.checks // len(models), options.seed))
        print(json.dumps(asdict(kinds[-1])), flush=True)
    total = report(kinds)
    print(json.dumps({name: value for name, value in total.items() if name != "kinds"}))
    if options.output:
        options.output.write_text(json.dumps(total, indent=1) + "\n")
    return int(any(kind.violations or kind.observer_faults for kind in kinds))


if __name__ == "__main__":
    sys.exit(main())
