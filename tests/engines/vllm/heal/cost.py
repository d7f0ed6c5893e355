"""What taint tracking costs the engine's thread: python -m tests.engines.vllm.heal.cost [--output FILE].

The part that a vLLM worker does per scheduler output, on outputs of a steady decode: thread CPU time, in
microseconds per step. Without tracking none of it runs. And what it takes to find the readers of damaged
blocks that they share, in milliseconds per finding of a whole block.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.requests import AddedBlocks, BlockTable, ChangedRequests, RequestChange
from canary_obs.engines.vllm.request_changes import RequestChanges
from canary_obs.records import Violation
from canary_obs.runtime.taint.good_checks import GoodChecks
from canary_obs.runtime.taint.tracker import TaintTracker
from canary_obs.vocabulary import Part, Phase, Reason

BLOCK, REQUESTS, CONTEXT, STEPS, TURNS = 16, 64, 4096, 800, 5
_READERS, _SHARED, _OF_READER = 256, 100, 250  # requests, and blocks of each: some of them shared


class Following:
    """The hook that a worker calls, with a tracker behind it."""

    def __init__(self, changes: RequestChanges, blocks: int) -> None:
        good = GoodChecks(lambda group, slot: None, lambda group, slot: None, hits_compared=True)
        self.tracker = TaintTracker(changes.tables, {"0": blocks}, good, lambda: None, lambda: None)
        self.step = 0

    def requests_changed(self, shown: ChangedRequests) -> None:
        """Follow them, as the canary does."""
        self.tracker.follow(shown, self.step)


def outputs(changing: bool) -> Iterator[Any]:
    """A first output that begins all requests, then decode; `changing`: they cross a block in turn."""
    names, free = [f"chat-{number}-1a2b3c4d" for number in range(REQUESTS)], 1
    new = []
    for name in names:
        blocks = list(range(free, free + CONTEXT // BLOCK))
        free += len(blocks)
        new.append(
            SimpleNamespace(
                req_id=name,
                block_ids=(blocks,),
                num_computed_tokens=0,
                prompt_token_ids=[5] * CONTEXT,
                prefill_token_ids=None,
            )
        )
    yield _output(new, _cached([], [], []), dict.fromkeys(names, CONTEXT))
    ones = dict.fromkeys(names, 1)
    for step in range(STEPS):
        added: list[Any] = [None] * REQUESTS
        for place in range(step % BLOCK, REQUESTS, BLOCK) if changing else ():
            added[place] = ([free],)
            free += 1
        yield _output([], _cached(names, added, [CONTEXT + step] * REQUESTS), ones)


def _cached(names: list[str], blocks: list[Any], computed: list[int]) -> Any:
    return SimpleNamespace(
        req_ids=names,
        new_block_ids=blocks,
        num_computed_tokens=computed,
        resumed_req_ids=set(),
        num_output_tokens=[0] * len(names),
    )


def _output(new: list[Any], cached: Any, scheduled: dict[str, int]) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=new, scheduled_cached_reqs=cached, finished_req_ids=set(), preempted_req_ids=None,
        num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={}, kv_cache_block_copies=None,
    )  # fmt: skip


def measure(*, changing: bool) -> float:
    """Microseconds of thread CPU time per step; the least of some turns, as others use this machine."""
    return min(_turn(changing) for _ in range(TURNS))


def _turn(changing: bool) -> float:
    group = SimpleNamespace(
        states=False, number=0, block_slots=BLOCK, block_size=BLOCK, view=SimpleNamespace(name="full")
    )
    changes = RequestChanges(cast("Any", [group]), rewrites=False)
    blocks = REQUESTS * (CONTEXT + STEPS) // BLOCK + 2 * REQUESTS
    following = Following(changes, blocks)
    first, *steps = outputs(changing)
    changes.report(first, {}, cast("Observer", following))
    started = time.thread_time()
    for number, output in enumerate(steps, start=1):
        following.step = number
        changes.report(output, {}, cast("Observer", following))
    return (time.thread_time() - started) / len(steps) * 1e6


def find_readers(blocks: int) -> float:
    """Milliseconds of thread CPU time to list all readers of so many damaged blocks, each slot a finding."""
    good = GoodChecks(lambda group, slot: None, lambda group, slot: None, hits_compared=True)
    own, shared = _OF_READER - _SHARED, np.arange(1, _SHARED + 1)
    table, held = BlockTable("0", BLOCK, BLOCK), 1 + _SHARED + own * _READERS
    tracker = TaintTracker({"full": table}, {"0": held}, good, lambda: None, lambda: None)
    for number in range(_READERS):
        first = 1 + _SHARED + number * own
        added = AddedBlocks(
            np.concatenate([shared, np.arange(first, first + own)]), 0, _SHARED if number else 0
        )
        change = RequestChange(
            request=f"r{number}", begins=True, prompt=_OF_READER * BLOCK, added={"0": added},
            computed=added.joined * BLOCK,
        )  # fmt: skip
        tracker.follow(ChangedRequests(changed=[change], ended={}), number)
    found = [
        Violation(
            phase=Phase.PATROL, reason=Reason.KV_DATA, group="full", part=Part.K, step=_READERS, event=1,
            slot=block * BLOCK + slot, position=None, request=None, expected=None, actual=None, lag_steps=0,
            time_ns=0,
        )
        for block in range(1, blocks + 1)
        for slot in range(BLOCK)
    ]  # fmt: skip
    started = time.thread_time()
    tracker.found(found, "incident", _READERS)
    tracker.reached()
    return (time.thread_time() - started) * 1e3 / blocks


def main(arguments: list[str] | None = None) -> None:
    """Print, and write, both figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    unchanged, mixed = measure(changing=False), measure(changing=True)
    found = {
        "requests": REQUESTS, "context": CONTEXT, "block": BLOCK, "steps": STEPS,
        "without_tracking_us": 0.0, "no_block_list_changes_us": round(unchanged, 2),
        "mean_of_steady_decode_us": round(mixed, 2),
        "readers": _READERS, "readers_of_one_block_ms": round(find_readers(1), 2),
        "readers_of_32_blocks_ms_per_block": round(find_readers(32), 2),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if given.output:
        given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
