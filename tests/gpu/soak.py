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
from tests.gpu.faults import PLANTERS, FaultyRunner, counted, plant
from tests.gpu.rig import Rig, make_rig

# Ten times what the patrol takes by default beside forwards on an H200 (0.1 % of 4.6 TB/s).
PATROL = "46GB/s"
FAULTS = 200


def clean(seconds: float, page_size: int) -> dict[str, Any]:
    """Traffic with eviction, preemption, aborts, captured graphs, sweeps and patrol; nothing planted."""
    rig = make_rig(patrol_budget=PATROL, sweep_interval=50, engine={"page_size": page_size})
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        rig.run(500)
    rig.canary.check_everything()
    return _report(rig) | {"seconds": round(time.monotonic() - started, 1)}


def planted(faults: int) -> dict[str, Any]:
    """Faults of every reason in turn, one at a time; each must be counted under its reason, and then end."""
    rig = make_rig(runner=FaultyRunner, patrol_budget=PATROL, sweep_interval=50)
    rig.run(300)
    draw, reasons = random.Random(5), list(PLANTERS)
    steps: dict[Reason, list[int | None]] = {reason: [] for reason in reasons}
    false_alarms = sum(counted(rig))
    for number in range(faults):
        reason = reasons[number % len(reasons)]
        steps[reason].append(plant(rig, reason, draw))
        after = sum(counted(rig))
        rig.run(5)
        false_alarms += sum(counted(rig)) - after
    return _report(rig) | {
        "planted": faults,
        "caught": sum(found is not None for one in steps.values() for found in one),
        "false_alarms_between_faults": false_alarms,
        "by_reason": {
            reason.name.lower(): {
                "planted": len(found),
                "caught": sum(one is not None for one in found),
                "most_steps": max((one for one in found if one is not None), default=None),
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
    """Exit code 0 = no violation in the clean part, no fault missed and no false alarm in the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    result = {"environment": environment(), "clean": clean(given.seconds, given.page_size)}
    ok = not result["clean"]["violations"]
    if given.output is not None:  # a machine that is taken away between the two takes no more than the second
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    if given.faults:
        found = result["planted"] = planted(given.faults)
        ok &= found["caught"] == given.faults and not found["false_alarms_between_faults"]
    sys.stdout.write(json.dumps(result) + "\n")
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
