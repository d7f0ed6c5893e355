"""Soak on a GPU: python -m tests.gpu.soak --seconds 1200 --output soak.json. Then 200 planted faults."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from canary_obs.records import PerturbMode
from tests.gpu.rig import Rig, make_rig

# Ten times what the patrol takes by default beside forwards on an H200 (0.1 % of 4.6 TB/s).
PATROL = "46GB/s"
FAULTS = 200


def clean(seconds: float) -> dict[str, Any]:
    """Traffic with eviction, preemption, aborts, captured graphs, sweeps and patrol; nothing planted."""
    rig = make_rig(patrol_budget=PATROL, sweep_interval=50, engine={"page_size": 1})
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        rig.run(500)
    rig.canary.check_everything()
    return _report(rig) | {"seconds": round(time.monotonic() - started, 1)}


def planted() -> dict[str, Any]:
    """FAULTS injections over all modes; the ledger says what became of each."""
    modes = ",".join(f"{mode.value}=0.05" for mode in PerturbMode)
    rig = make_rig(
        patrol_budget=PATROL, sweep_interval=50, perturb=modes, perturb_enabled=True, perturb_limit=FAULTS
    )
    while rig.canary.injector.ledger.injected < FAULTS:
        rig.run(50)
    rig.run(200)
    rig.canary.check_everything()
    return _report(rig) | {"ledger": rig.canary.injector.ledger.summary()}


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
    """Exit code 0 = no violation in the clean part, no fault missed in the planted part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    result = {"device": torch.cuda.get_device_name(), "clean": clean(given.seconds), "planted": planted()}
    sys.stdout.write(json.dumps(result) + "\n")
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    missed = sum(tally["missed"] + tally["open"] for tally in result["planted"]["ledger"].values())
    return int(bool(result["clean"]["violations"]) or missed > 0)


if __name__ == "__main__":
    sys.exit(main())
