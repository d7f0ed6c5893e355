"""The table that counts, on the reference engine: python -m tests.engines.reference.heal_table --output FILE.

Greedy requests with faults at random, per model and policy, compared with the same requests without: which
wrong answers were delivered, and whether each of them is listed as tainted. Exit code 1 when one is not
listed, when one that was known to be tainted leaves under `protect`, or when anything leaks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from canary_obs.vocabulary import HealAction, HealOutcome
from tests.engines.reference.heal.judge import Judge
from tests.engines.reference.heal.serve import Served, late, serve

MODELS = ("llama", "swa", "speculative", "host_tier", "compressed")
LATENT = ("mla", "mla_sparse")
LANE_ROWS = {"compressed": 1024}  # with 32 findings are dropped: who read a damaged entry is not all known
POLICIES = ("off", "dry_run", "evict", "protect")


def row_of(clean: Served, faulty: Served, judge: Judge) -> dict[str, Any]:
    """The numbers that count."""
    nearly = judge.nearly_right(faulty)
    wrong = {name for name, right in clean.answers.items() if faulty.answers[name] != right} - nearly.keys()
    delivered, listed = wrong - faulty.errors, set(faulty.listed)
    done = faulty.actions(HealOutcome.DONE) + faulty.actions(HealOutcome.UNVERIFIED)
    would = faulty.actions(HealOutcome.WOULD)
    return {
        "requests": len(clean.answers),
        "faults": dict(sorted(faulty.planted.items())),
        "damages": faulty.damages,
        "damages_unknown": sum(faulty.causes.values()),
        "wrong_delivered": len(delivered),
        "wrong_delivered_after_detection": len(late(clean, faulty) - nearly.keys()),
        "right_but_different": {name: round(lead, 9) for name, lead in sorted(nearly.items())},
        "wrong_not_listed": sorted(delivered - listed),
        "correct_listed": len(listed - wrong - faulty.errors),
        "ended_with_error": len(faulty.errors),
        "ended_though_right_so_far": len(
            [n for n in faulty.errors if clean.answers[n][: len(faulty.answers[n])] == faulty.answers[n]]
        ),
        "recomputed_tokens": sum(heal.tokens for heal in faulty.heals if heal.outcome is HealOutcome.DONE),
        "actions": {action.value: done[action] for action in HealAction if done[action]},
        "would": {action.value: would[action] for action in HealAction if would[action]},
        "evicted_blocks": sum(
            heal.blocks for heal in faulty.heals if heal.outcome in (HealOutcome.DONE, HealOutcome.UNVERIFIED)
        ),
        "median_steps_to_find_bytes": statistics.median(faulty.steps_to_find or [0]),
        "median_latency_ms": [
            round(1e3 * statistics.median(one.seconds_of), 1) for one in (clean, faulty)
        ],
        "leaked": faulty.leaked + clean.leaked,
        "listed_without_faults": len(clean.listed),
        "healing_limited": None if faulty.status is None else faulty.status.why,
        "observer_faults": faulty.faults,
    }  # fmt: skip


def passed(policy: str, row: dict[str, Any]) -> bool:
    """Acceptance: whoever is wrong is listed, and with `protect` nothing wrong leaves after detection."""
    late = policy == "protect" and row["wrong_delivered_after_detection"]
    return not (
        late or row["wrong_not_listed"] or row["leaked"] or row["listed_without_faults"]
        or row["observer_faults"] or row["healing_limited"]
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """One row per model and policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--model", choices=MODELS + LATENT, action="append", help="default: all")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for model in given.model or MODELS + LATENT:
        clean, lane_rows = serve(given.requests, model=model), LANE_ROWS.get(model, 32)
        judge = Judge(clean)
        for policy in given.policy or POLICIES:
            faulty = serve(given.requests, model=model, policy=policy, faults=given.seed, lane_rows=lane_rows)
            what = {"model": model, "policy": policy, "seed": given.seed, "lane_rows": lane_rows}
            rows.append(what | row_of(clean, faulty, judge))
            print(json.dumps(rows[-1]), flush=True)
            if given.output:
                given.output.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    return int(not all(passed(row["policy"], row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
