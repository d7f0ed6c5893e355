"""Many healing actions on a real vLLM.

python -m tests.engines.vllm.heal.endurance V1|V2|TP2 10000 RESULT.json [SECONDS]

Blocks of running requests are reported as damaged although they are not, while requests are preempted,
aborted, prefilled in chunks, and the prefix cache is reset. After each round the file has what was done
so far. SECONDS count from the program's start: what runs then is aborted, and references are compared.
Exit code 1 when one was left behind, when requests stood still, or when a step did not return (its stack
is printed). With HEAL_DEVICE=cuda it runs on a GPU, TP2 on two; HEAL_ASYNCHRONOUS=1 schedules
asynchronously on a CPU, too.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.vllm.heal.false_findings import add_findings, false_finding
from tests.engines.vllm.heal.program import ASYNCHRONOUS, ON_GPU, on_gpu, prepare

ENGINE: dict[str, Any] = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 24, "max_model_len": 512}
TWO_RANKS = "TP2"  # with the V1 runner
# Asking torch for devices is enough to spoil forked workers. vLLM's own all-reduce is not in all builds.
OF_RANKS, START = {"disable_custom_all_reduce": True}, ("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
_REQUESTS, _TOKENS = 8, 40
_STANDSTILL = 500  # steps without a token; the prompts of a round take 25
_GRACE = 45.0  # seconds for the last steps


def endure(
    rig: Any,
    enough: Callable[[Counter[str]], bool],
    seed: int = 3,
    *,
    late: Callable[[], bool] = lambda: False,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Rounds of requests and false findings until `enough` says so of the actions so far.

    `late` is asked at every step, and ends a round where it is. `report` gets what was done after each.
    """
    from canary_obs.healing.guard_rail import Limits
    from canary_obs.vocabulary import HealPolicy

    draw, events, began = random.Random(seed), Counter[str](), time.monotonic()
    limits, ranks = Limits(1_000_000_000, 1_000.0), rig if hasattr(rig, "of_ranks") else OneRank(rig)
    pool, before = rig.core.scheduler.kv_cache_manager.block_pool, ranks.counts()
    clean, restore = (pool.get_num_free_blocks(), references(rig)), _count_preemptions(rig, events)
    stuck: list[str] = []

    def so_far() -> dict[str, Any]:
        done, seconds = ranks.counts() - before, time.monotonic() - began
        return {
            "actions": dict(sorted(done.items())),
            "actions_per_second": round(done.total() / seconds, 2),
            "events": dict(sorted(events.items())),
            "seconds": round(seconds, 1),
            "stuck": stuck,
        }

    try:
        while not (stuck or late() or enough(ranks.counts() - before)):
            ranks.choose((HealPolicy.EVICT, HealPolicy.PROTECT)[events["rounds"] % 2], limits)
            stuck += _round(rig, ranks, draw, events, late)
            report(so_far())
    finally:
        restore()
    ranks.release()
    for _ in range(2):  # the scheduler hears of it, and answers
        rig.generate([[5] * 20], tokens=1)
    return so_far() | {
        "healing": [why for _, why in ranks.healing() if why is not None],
        "observer_faults": [faults for faults in ranks.faults() if faults],
        "references_as_before": (pool.get_num_free_blocks(), references(rig)) == clean,
    }


class OneRank:
    """A rig whose worker is in this process, as one with several ranks answers."""

    def __init__(self, rig: Any) -> None:
        self._canary = rig.canary

    def choose(self, policy: Any, limits: Any) -> None:
        """This policy."""
        self._canary.healing._limits = limits
        self._canary.healing.choose(policy)

    def release(self) -> None:
        """All blocks."""
        self._canary.healing.release(None)

    def report(self, _rank: int, found: list[Any]) -> None:
        """As if a check had found it."""
        add_findings(self._canary, found)

    def counts(self) -> Counter[str]:
        """How often each action had each outcome."""
        return actions_of(self._canary)

    def healing(self) -> list[tuple[str, str | None]]:
        """What is followed, and why."""
        status = self._canary.healing.status
        return [(status.effective.value, status.why)]

    def faults(self) -> list[dict[str, int]]:
        """Of the observer."""
        return [dict(self._canary.health.faults)]


def _round(
    rig: Any, ranks: Any, draw: random.Random, events: Counter[str], late: Callable[[], bool]
) -> list[str]:
    number, engine = events["rounds"], rig.llm.llm_engine
    events["rounds"] += 1
    prompts = random.Random(draw.randrange(6))
    names = {
        f"{number}-{each}": [prompts.randrange(4, 1024) for _ in range(40 + 30 * each)]
        for each in range(_REQUESTS)
    }
    ranks.release()  # or quarantine leaves too few blocks for the longest request
    rig.start(names, tokens=_TOKENS)
    events["requests"] += len(names)
    for _ in range(3):
        rig.step(draw.randrange(1, 6))
        blocks = sorted({block for name in names for block in _held_by(rig, name)})
        wrong = [false_finding(block, 32) for block in draw.sample(blocks, min(3, len(blocks)))]
        ranks.report(draw.randrange(2), wrong)
        rig.step(2)
    if number % 3 == 0:
        engine.abort_request([f"{number}-0", f"{number}-1"])
        events["aborts"] += 2
    if number % 3 == 1:
        events["resets"] += bool(engine.reset_prefix_cache(reset_running_requests=number % 2 == 0))
    return _finish(rig, [*names], events, late)


def _finish(rig: Any, names: list[str], events: Counter[str], late: Callable[[], bool]) -> list[str]:
    """Serve what is left, or abort it once it is late. What the scheduler has, if it stands still."""
    engine, silent, stuck = rig.llm.llm_engine, 0, list[str]()
    while engine.has_unfinished_requests() and not stuck:
        if late():
            events["rounds_cut_short"] += 1
            break
        silent = 0 if engine.step() else silent + 1
        if silent == _STANDSTILL:
            scheduler = rig.core.scheduler
            stuck = [
                f"{one.request_id} {one.status.name}: {one.num_computed_tokens} of {one.num_tokens} tokens"
                for one in [*scheduler.running, *scheduler.waiting]
            ]
    if engine.has_unfinished_requests():
        engine.abort_request(names)
    rig.finish()
    return stuck


def _count_preemptions(rig: Any, events: Counter[str]) -> Callable[[], None]:
    scheduler = rig.core.scheduler
    preempt = scheduler._preempt_request

    def counted(request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        events["preemptions"] += not drop_stale_output  # healing and resets drop it
        preempt(request, timestamp, drop_stale_output)

    scheduler._preempt_request = counted
    return lambda: vars(scheduler).pop("_preempt_request")


def actions_of(canary: Any) -> Counter[str]:
    """How often each action had each outcome."""
    return Counter(
        {
            f"{action.value} {outcome.value}": count
            for action, outcomes in canary.healing.counts.items()
            for outcome, count in outcomes.items()
            if count
        }
    )


def references(rig: Any) -> list[int]:
    """Of each block but the null block."""
    return [block.ref_cnt for block in rig.core.scheduler.kv_cache_manager.block_pool.blocks[1:]]


def _held_by(rig: Any, name: str) -> list[int]:
    try:
        return list(rig.blocks_of(name))
    except (KeyError, StopIteration):  # it waits
        return []


def main(runner: str, actions: int, result: Path, seconds: float = 86_400.0) -> int:
    """Write what happened, after so many actions or seconds."""
    until = time.monotonic() + seconds
    faulthandler.dump_traceback_later(seconds + _GRACE, exit=True)
    if runner == TWO_RANKS:
        os.environ.update([START])
    prepare(runner)
    from tests.engines.vllm.real.models import make_model
    from tests.engines.vllm.real.ranks import RanksRig
    from tests.engines.vllm.real.rig import Rig, keep_asynchronous

    def write(found: dict[str, Any]) -> None:
        result.write_text(json.dumps({"runner": runner} | found, indent=1) + "\n", encoding="utf-8")
        done = sum(found["actions"].values())
        print(f"{found['seconds']} s, {done} actions, {dict(found['events'])}", flush=True)

    kind, engine = Rig, ENGINE | (ON_GPU if on_gpu() else {})
    if runner == TWO_RANKS:
        kind, engine = RanksRig, engine | OF_RANKS
    if os.environ.get(ASYNCHRONOUS) == "1":
        keep_asynchronous()
        engine["async_scheduling"] = True
    with tempfile.TemporaryDirectory() as folder:
        rig = kind(make_model(Path(folder), "llama"), **engine)
        found = endure(
            rig, lambda done: done.total() >= actions, late=lambda: time.monotonic() > until, report=write
        )
        rig.close()
    write(found)
    faulthandler.cancel_dump_traceback_later()
    return int(not found["references_as_before"] or bool(found["observer_faults"] or found["stuck"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *map(float, sys.argv[4:])))
