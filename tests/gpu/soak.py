"""Soak on a GPU, then faults of all reasons: python -m tests.gpu.soak --seconds 1200 --output soak.json."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from canary_kernels.layout import Reason
from canary_obs.bench.environment import environment
from tests.gpu.faults import FAULTS, FaultyRunner, counted, inject
from tests.gpu.rig import Rig, make_rig

# Ten times the patrol's default budget during forwards on an H200 (0.1 % of 4.6 TB/s).
PATROL = "46GB/s"
FAULT_COUNT = 200


def clean(seconds: float, page_size: int) -> dict[str, Any]:
    """Traffic with eviction, preemption, aborts, captured graphs, sweeps and patrol; no faults."""
    rig = make_rig(patrol_budget=PATROL, sweep_interval=50, engine={"page_size": page_size})
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        rig.run(500)
    rig.canary.check_everything()
    return _report(rig) | {"seconds": round(time.monotonic() - started, 1)}


def with_faults(faults: int) -> dict[str, Any]:
    """Faults of all reasons, one at a time; each must be counted under its reason, and nothing after."""
    rig = make_rig(runner=FaultyRunner, patrol_budget=PATROL, sweep_interval=50)
    rig.run(300)
    draw, reasons = random.Random(5), list(FAULTS)
    steps: dict[Reason, list[int | None]] = {reason: [] for reason in reasons}
    false_alarms = sum(counted(rig))
    for number in range(faults):
        reason = reasons[number % len(reasons)]
        steps[reason].append(inject(rig, reason, draw))
        after = sum(counted(rig))
        rig.run(5)
        false_alarms += sum(counted(rig)) - after
    return _report(rig) | {
        "injected": faults,
        "caught": sum(found is not None for results in steps.values() for found in results),
        "false_alarms_between_faults": false_alarms,
        "by_reason": {
            reason.name.lower(): {
                "injected": len(found),
                "caught": sum(count is not None for count in found),
                "most_steps": max((count for count in found if count is not None), default=None),
            }
            for reason, found in steps.items()
        },
    }


def _report(rig: Rig) -> dict[str, Any]:
    final = rig.canary.detach()
    counters, statistics = final.groups["full"], rig.engine.statistics
    return {
        "steps": statistics.steps,
        "tokens": statistics.tokens,
        "evictions": statistics.evictions,
        "preemptions": statistics.preemptions,
        "prefix_hit_tokens": statistics.prefix_hit_tokens,
        "slots_verified": sum(counters.verified.values()),
        "slots_hashed": sum(counters.hashed.values()),
        "sweep_passes": sum(final.sweep_passes.values()),
        "patrol_cycles": final.patrol.cycles if final.patrol else 0,
        "violations": {
            reason.value: count
            for reason in next(iter(counters.violations.values()))
            if (count := sum(by_reason[reason] for by_reason in counters.violations.values()))
        },
        "observer_faults": final.observer_faults,
        "state": final.state.value,
        "state_reasons": final.state_reasons,
    }


def main() -> int:
    """Exit code 0 = no violation without faults; no fault missed and no false alarm with them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--faults", type=int, default=FAULT_COUNT)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    result = {"environment": environment(), "clean": clean(given.seconds, given.page_size)}
    ok = not result["clean"]["violations"]
    if given.output is not None:  # now already: a lent machine may be taken away before the second part
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    if given.faults:
        found = result["injected"] = with_faults(given.faults)
        ok &= found["caught"] == given.faults and not found["false_alarms_between_faults"]
    sys.stdout.write(json.dumps(result) + "\n")
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
