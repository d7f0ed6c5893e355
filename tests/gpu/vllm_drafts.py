"""A vLLM that speculates, its draft's layers protected: python3 -m tests.gpu.vllm_drafts --runner v2.

Exit code 1 = one of `checks` in the printed JSON is false.
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
from canary_obs.runtime.report.snapshot import group_counters
from canary_obs.vocabulary import Reason, State
from tests.engines.vllm.real.rig import prompts
from tests.gpu.draft_engine import METHODS, SEED, Plan, answers, counting, start

FLIPS = 8  # of idle cached blocks, and as many of blocks in use
_INTEGERS = {2: torch.int16, 4: torch.int32}


class DraftCache:
    """The cache of the draft's first layer, in which one bit at a time is flipped and restored."""

    def __init__(self, vllm: InProcessVllm, canary: CanaryRuntime, adapter: VllmAdapter) -> None:
        self.own = next(found for found in adapter.vllm_groups if found.draft)
        cache = vllm.config.compilation_config.static_forward_context[self.own.layers[0]].kv_cache
        self._words = cache.view(_INTEGERS[cache.element_size()])  # [blocks, heads, block size, K | V]
        self._vllm, self._canary, self._adapter = vllm, canary, adapter
        self._draw = random.Random(SEED)

    def flip(self, blocks: list[int]) -> dict[str, Any]:
        """Flips counted under `draft`, flips whose slot was named, and violations by group."""
        counts, by_group = {"flips": len(blocks), "counted": 0, "slot_named": 0}, Counter[str]()
        for block in blocks:
            index = (self._draw.randrange(length) for length in self._words.shape[1:])
            counted, rows = self._checked((block, *index), 1 << self._draw.randrange(14))
            by_group += counted
            counts["counted"] += counted["draft"] > 0
            counts["slot_named"] += {(row.group, row.reason) for row in rows} == {("draft", Reason.KV_DATA)}
        return counts | {"by_group": dict(by_group)}

    def _checked(self, place: tuple[int, ...], bit: int) -> tuple[Counter[str], list[Violation]]:
        rows: list[Violation] = []
        reporter, report = self._canary.reporter, self._canary.reporter.send_violations

        def report_and_keep(found: list[Violation]) -> None:
            rows.extend(found)
            report(found)

        with self._adapter.paused(), torch.inference_mode():
            self._vllm.synchronize()
            before = counted(self._canary)
            reporter.send_violations = report_and_keep  # type: ignore[method-assign]
            self._words[place] ^= bit
            with torch.inference_mode(False):
                self._canary.check_everything()
            self._words[place] ^= bit
            self._vllm.synchronize()
            reporter.send_violations = report  # type: ignore[method-assign]
        size = self.own.block_size
        # On CPUs a token's bytes do not lie at its offset: there only the block is known.
        exact = range(place[2], place[2] + 1) if self._words.is_cuda else range(size)
        first = place[0] * size
        return counted(self._canary) - before, [row for row in rows if row.slot - first in exact]


def counters(canary: CanaryRuntime) -> dict[str, GroupCounters]:
    """By group, the patrol's included."""
    return group_counters(canary.state, canary.counter_reader)


def counted(canary: CanaryRuntime) -> Counter[str]:
    """Violations of all reasons so far, by group."""
    groups = counters(canary).items()
    return Counter({n: sum(sum(reasons.values()) for reasons in g.violations.values()) for n, g in groups})


def flips(vllm: InProcessVllm, canary: CanaryRuntime, adapter: VllmAdapter, plan: Plan) -> dict[str, Any]:
    """Flips in idle cached blocks, then in blocks that running requests use."""
    cache_of_draft, draw = DraftCache(vllm, canary, adapter), random.Random(SEED)
    result = {"idle": cache_of_draft.flip(draw.sample(sorted(vllm.idle_blocks()), FLIPS))}
    vllm.add_requests(prompts(FLIPS, seed=SEED + 1), plan.tokens)
    steps = iter(range(12))
    vllm.run(lambda _: next(steps, None) is None)
    # Only blocks of the prompts' shared beginnings: no step writes them any more.
    whole = 200 // cache_of_draft.own.block_size
    lists = dict(adapter.request_blocks(cache_of_draft.own.number)).values()
    used = sorted({block for blocks in lists for block in blocks[:whole]})
    result["in_use"] = cache_of_draft.flip(draw.sample(used, FLIPS))
    vllm.run()
    return result


def waits(vllm: InProcessVllm, canary: CanaryRuntime, adapter: VllmAdapter) -> dict[str, Any]:
    """Waits for the device within hooks, the draft group's included, while requests arrive and end."""
    drafts = adapter._drafts
    if drafts is None:
        return {"checked": False}
    return find_device_waits(vllm, canary, adapter, also=((drafts, ("begin",)),))


def of_draft(counted: GroupCounters) -> dict[str, Any]:
    """Checks of the draft's slots, and the share of them that could not be verified."""
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


def measure(vllm: InProcessVllm, plan: Plan) -> dict[str, Any]:
    """The same load without the canary, with it, then bit flips, and the load without it again."""
    without = answers(vllm, plan)
    os.environ["KV_CANARY_MODE"] = "log"
    with attached(vllm) as (canary, adapter):
        if not any(found.draft for found in adapter.vllm_groups):
            return {
                "groups": [found.view.name for found in adapter.vllm_groups],
                "coverage": canary.state.coverage,
            }
        with counting(vllm, adapter) as seen:
            protected = answers(vllm, plan)
        with adapter.paused():
            canary.check_everything()
        state, reasons = canary.verdict()
        found: dict[str, Any] = {
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
        found["waits"] = waits(vllm, canary, adapter)
        found["violations_of_counted"] = sum(counted(canary).values())
        found["flips"] = flips(vllm, canary, adapter, plan)
        found["faults_after"] = {part: count for part, count in canary.health.faults.items() if count}
    again = answers(vllm, plan)
    found["same_outputs"] = protected == without
    found["same_outputs_without_canary"] = again == without
    found["distinct_tokens"] = len({token for answer in without for token in answer})
    found["follows_last_token"] = round(_followed(without), 3)
    return found


def _followed(answers: list[list[int]]) -> float:
    pairs = [(a, b) for answer in answers for a, b in pairwise(answer)]
    return sum(b == a + 1 for a, b in pairs) / len(pairs)


def checks(found: dict[str, Any], facts: dict[str, Any]) -> dict[str, bool]:
    """Each requirement by name, and whether it is met."""
    if "draft" not in found:
        return {"a draft group is there (draft.py supports this device)": False}
    on_gpu = torch.cuda.is_available()
    flipped = found["flips"].values()
    return {
        "asynchronous scheduling": facts["async_scheduling"] or not on_gpu,
        "CUDA graphs": "NONE" not in facts["cudagraph_mode"] or not on_gpu,
        "preempted, accepted and rejected": min(found[n] for n in ("preempted", "accepted", "rejected")) > 0,
        "no violation": found["violations"] == found["violations_of_counted"] == 0,
        "no fault of the observer": not found["faults"] and not found["faults_after"],
        "state ok": found["state"] == [State.OK.value],
        "draft group verified": min(found["draft"][n] for n in ("verified", "hashed", "completed")) > 0,
        "no wait for the device": not found["waits"].get("waits"),
        "same outputs": found["same_outputs"],
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
            vllm = start(Path(folder), plan)
            facts = vllm.description()
            result |= facts | {"started_seconds": round(time.monotonic() - began, 1)}
            figures = measure(vllm, plan)
            result |= figures | {"checks": checks(figures, facts)}
            vllm.shutdown()
    except Exception:  # noqa: BLE001 - reported in the result, which must be written
        result |= {"error": traceback.format_exc(), "checks": {"ran to its end": False}}
    result |= {"seconds": round(time.monotonic() - began, 1), "ok": all(result["checks"].values())}
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if plan.output is not None:
        plan.output.write_text(text)
    return int(not result["ok"])


if __name__ == "__main__":
    sys.exit(main())
