"""A vLLM that speculates, its draft's layers watched: python3 -m tests.gpu.vllm_drafts --runner v2.

Exit code 1 = something of `checks` in what it prints does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
import traceback
from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from canary_obs.bench.environment import environment
from canary_obs.bench.vllm_canary import attached, find_device_waits
from canary_obs.demo.in_process_vllm import InProcessVllm
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.records import GroupCounters, Violation
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.report.snapshot import counters_of
from canary_obs.vocabulary import Reason, State
from tests.engines.vllm.real.rig import prompts
from tests.gpu.draft_engine import METHODS, SEED, Plan, answers, start, watching

FLIPS = 8  # of idle cached blocks, and as many of blocks in use
_INTEGERS = {2: torch.int16, 4: torch.int32}


class Tampered:
    """The cache of the draft's first layer, in which one bit at a time is turned and turned back."""

    def __init__(self, host: InProcessVllm, canary: CanaryRuntime, adapter: VllmAdapter) -> None:
        self.own = next(found for found in adapter.found if found.draft)
        cache = host.config.compilation_config.static_forward_context[self.own.layers[0]].kv_cache
        self._words = cache.view(_INTEGERS[cache.element_size()])  # [blocks, heads, block size, K | V]
        self._host, self._canary, self._adapter = host, canary, adapter
        self._draw = random.Random(SEED)

    def flip(self, blocks: list[int]) -> dict[str, Any]:
        """How many flips were counted under `draft`, and named their slot; violations of all groups."""
        told, by_group = {"flips": len(blocks), "counted": 0, "slot_named": 0}, Counter[str]()
        for block in blocks:
            rest = (self._draw.randrange(length) for length in self._words.shape[1:])
            counted, rows = self._checked((block, *rest), 1 << self._draw.randrange(14))
            by_group += counted
            told["counted"] += counted["draft"] > 0
            told["slot_named"] += {(row.group, row.reason) for row in rows} == {("draft", Reason.KV_DATA)}
        return told | {"by_group": dict(by_group)}

    def _checked(self, place: tuple[int, ...], bit: int) -> tuple[Counter[str], list[Violation]]:
        rows: list[Violation] = []
        reporter, keep = self._canary.reporter, self._canary.reporter.violations

        def listen(found: list[Violation]) -> None:
            rows.extend(found)
            keep(found)

        with self._adapter.at_rest(), torch.inference_mode():
            self._host.synchronize()
            before = counted(self._canary)
            reporter.violations = listen  # type: ignore[method-assign]
            self._words[place] ^= bit
            with torch.inference_mode(False):
                self._canary.check_everything()
            self._words[place] ^= bit
            self._host.synchronize()
            reporter.violations = keep  # type: ignore[method-assign]
        size = self.own.block_size
        # On CPUs a token's bytes do not lie at its offset: there only the block is known.
        exact = range(place[2], place[2] + 1) if self._words.is_cuda else range(size)
        first = place[0] * size
        return counted(self._canary) - before, [row for row in rows if row.slot - first in exact]


def counters(canary: CanaryRuntime) -> dict[str, GroupCounters]:
    """By group, the patrol's among them."""
    return counters_of(canary)


def counted(canary: CanaryRuntime) -> Counter[str]:
    """Violations of all reasons so far, by group."""
    groups = counters(canary).items()
    return Counter({n: sum(sum(reasons.values()) for reasons in g.violations.values()) for n, g in groups})


def flips(host: InProcessVllm, canary: CanaryRuntime, adapter: VllmAdapter, plan: Plan) -> dict[str, Any]:
    """Of idle cached blocks, then of blocks that running requests use."""
    tampered, draw = Tampered(host, canary, adapter), random.Random(SEED)
    result = {"idle": tampered.flip(draw.sample(sorted(host.idle_blocks()), FLIPS))}
    host.add_requests(prompts(FLIPS, seed=SEED + 1), plan.tokens)
    steps = iter(range(12))
    host.run(lambda _: next(steps, None) is None)
    # Blocks of the prompts' shared beginnings: no step writes them any more.
    whole = 200 // tampered.own.block_size
    lists = dict(adapter.request_blocks(tampered.own.number)).values()
    used = sorted({block for blocks in lists for block in blocks[:whole]})
    result["in_use"] = tampered.flip(draw.sample(used, FLIPS))
    host.run()
    return result


def waits(host: InProcessVllm, canary: CanaryRuntime, adapter: VllmAdapter) -> dict[str, Any]:
    """Whether a hook waits for the device while requests come and go, drafts' own among them."""
    drafts = adapter._drafts
    if drafts is None:
        return {"checked": False}
    return find_device_waits(host, canary, adapter, also=((drafts, ("begin",)),))


def of_draft(counted: GroupCounters) -> dict[str, Any]:
    """Checks of the draft's slots, and the share of them that had nothing to be checked against."""
    verified = sum(counted.verified.values())
    unverified = {cause.value: count for cause, count in counted.unverified.items() if count}
    without = sum(unverified.values())
    return {
        "verified": verified,
        "hashed": sum(counted.hashed.values()),
        "completed": counted.completed,
        "unverified": unverified,
        "unverified_share": round(without / max(1, verified + without), 5),
    }


def observe(host: InProcessVllm, plan: Plan) -> dict[str, Any]:
    """The same work without the canary, with it, and without it again; then flips."""
    without = answers(host, plan)
    os.environ["KV_CANARY_MODE"] = "log"
    with attached(host) as (canary, adapter):
        if not any(found.draft for found in adapter.found):
            return {"groups": [found.view.name for found in adapter.found], "coverage": canary.state.coverage}
        with watching(host, adapter) as seen:
            protected = answers(host, plan)
        with adapter.at_rest():
            canary.check_everything()
        state, reasons = canary.verdict()
        told: dict[str, Any] = {
            "steps": seen.steps, "accepted": seen.accepted, "rejected": seen.rejected,
            "preempted": seen.preempted, "begin_us_median": round(statistics.median(seen.begin_us), 1),
            "host_us_per_step": {
                hook: round(1e6 * spent / seen.steps, 1) for hook, spent in canary.overhead.items()
            },
            "groups": [group.name for group in canary.state.groups],
            "coverage": canary.state.coverage,
            "violations": canary.counter_reader.violations,
            "faults": {part: count for part, count in canary.health.faults.items() if count},
            "state": [state.value, *reasons],
            "draft": of_draft(counters(canary)["draft"]),
            "swept": canary.sweeper.last.total if canary.sweeper.last else 0,
        }  # fmt: skip
        told["waits"] = waits(host, canary, adapter)
        told["violations_of_counted"] = sum(counted(canary).values())
        told["flips"] = flips(host, canary, adapter, plan)
        told["faults_after"] = {part: count for part, count in canary.health.faults.items() if count}
    again = answers(host, plan)
    told["same_outputs"] = protected == without
    told["same_outputs_without_canary"] = again == without
    told["distinct_tokens"] = len({token for answer in without for token in answer})
    told["follows_last_token"] = round(_followed(without), 3)
    return told


def _followed(answers: list[list[int]]) -> float:
    pairs = [(a, b) for answer in answers for a, b in pairwise(answer)]
    return sum(b == a + 1 for a, b in pairs) / len(pairs)


def checks(told: dict[str, Any], facts: dict[str, Any]) -> dict[str, bool]:
    """What has to hold, by name."""
    if "draft" not in told:
        return {"a draft group is there (draft.py's gate is open for this device)": False}
    on_gpu = torch.cuda.is_available()
    flipped = told["flips"].values()
    return {
        "asynchronous scheduling": facts["async_scheduling"] or not on_gpu,
        "CUDA graphs": "NONE" not in facts["cudagraph_mode"] or not on_gpu,
        "preempted, accepted and rejected": min(told[n] for n in ("preempted", "accepted", "rejected")) > 0,
        "no violation": told["violations"] == told["violations_of_counted"] == 0,
        "no fault of the observer": not told["faults"] and not told["faults_after"],
        "state ok": told["state"] == [State.OK.value],
        "draft group verified": min(told["draft"][n] for n in ("verified", "hashed", "completed")) > 0,
        "no wait for the device": not told["waits"].get("waits"),
        "same outputs": told["same_outputs"],
        "flips counted under draft": all(each["counted"] == FLIPS for each in flipped),
        "slots named": all(each["slot_named"] == FLIPS for each in flipped),
        "no flip counted elsewhere": all(set(each["by_group"]) == {"draft"} for each in flipped),
    }


def main() -> int:
    """Exit code 0 = all checks hold."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runner", choices=("v1", "v2"), required=True)
    parser.add_argument("--draft", choices=tuple(METHODS), default="eagle")
    parser.add_argument("--requests", type=int, default=64 if on_gpu else 8)
    parser.add_argument("--tokens", type=int, default=96 if on_gpu else 40)
    parser.add_argument("--output", type=Path)
    plan = Plan(**vars(parser.parse_args()))
    os.environ |= {"KV_CANARY_ENDPOINT": "inproc", "KV_CANARY_MODE": "none"}
    began = time.monotonic()
    result: dict[str, Any] = {"plan": {"runner": plan.runner, "draft": plan.draft}} | environment()
    try:
        with TemporaryDirectory() as folder:
            host = start(Path(folder), plan)
            facts = host.description()
            result |= facts | {"started_seconds": round(time.monotonic() - began, 1)}
            told = observe(host, plan)
            result |= told | {"checks": checks(told, facts)}
            host.shutdown()
    except Exception:  # noqa: BLE001 - told in the result, which must be written
        result |= {"error": traceback.format_exc(), "checks": {"ran to its end": False}}
    result |= {"seconds": round(time.monotonic() - began, 1), "ok": all(result["checks"].values())}
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if plan.output is not None:
        plan.output.write_text(text)
    return int(not result["ok"])


if __name__ == "__main__":
    sys.exit(main())
