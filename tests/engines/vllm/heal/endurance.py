"""Many healing actions on a real vLLM.

python -m tests.engines.vllm.heal.endurance V1 10000 RESULT.json [SECONDS]

Blocks of running requests are reported as damaged although they are not, while requests are preempted,
aborted, prefilled in chunks, and the prefix cache is reset. Exit code 1 when a reference was left behind.
With HEAL_DEVICE=cuda it runs on a GPU.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.vllm.heal.program import ON_GPU, on_gpu, prepare

ENGINE: dict[str, Any] = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 24, "max_model_len": 512}
_REQUESTS, _TOKENS = 8, 40


def endure(rig: Any, enough: Callable[[Counter[str]], bool], seed: int = 3) -> dict[str, Any]:
    """Rounds of requests and false findings until `enough` says so of the actions so far."""
    from canary_obs.healing.guard_rail import Limits
    from canary_obs.vocabulary import HealPolicy

    draw, events, began = random.Random(seed), Counter[str](), time.monotonic()
    rig.canary.healing._limits = Limits(1_000_000_000, 1_000.0)
    pool, before = rig.core.scheduler.kv_cache_manager.block_pool, actions_of(rig)
    clean, restore = (pool.get_num_free_blocks(), references(rig)), _count_preemptions(rig, events)
    try:
        while not enough(actions_of(rig) - before):
            rig.canary.healing.choose((HealPolicy.EVICT, HealPolicy.PROTECT)[events["rounds"] % 2])
            _round(rig, draw, events)
    finally:
        restore()
    rig.canary.healing.release(None)
    for _ in range(2):  # the scheduler hears of it, and answers
        rig.generate([[5] * 20], tokens=1)
    return {
        "actions": dict(sorted((actions_of(rig) - before).items())),
        "events": dict(sorted(events.items())),
        "seconds": round(time.monotonic() - began, 1),
        "healing": rig.canary.healing.status.why,
        "observer_faults": dict(rig.canary.health.faults),
        "references_as_before": (pool.get_num_free_blocks(), references(rig)) == clean,
    }


def _round(rig: Any, draw: random.Random, events: Counter[str]) -> None:
    number, engine = events["rounds"], rig.llm.llm_engine
    events["rounds"] += 1
    prompts = random.Random(draw.randrange(6))
    names = {
        f"{number}-{each}": [prompts.randrange(4, 1024) for _ in range(40 + 30 * each)]
        for each in range(_REQUESTS)
    }
    rig.canary.healing.release(None)  # or quarantine leaves too few blocks for the longest request
    rig.start(names, tokens=_TOKENS)
    events["requests"] += len(names)
    for _ in range(3):
        rig.step(draw.randrange(1, 6))
        blocks = sorted({block for name in names for block in _held_by(rig, name)})
        wrong = [false_finding(block) for block in draw.sample(blocks, min(3, len(blocks)))]
        rig.canary.healing.found(wrong, (), "", rig.canary.step)
        rig.step(2)
    if number % 3 == 0:
        engine.abort_request([f"{number}-0", f"{number}-1"])
        events["aborts"] += 2
    if number % 3 == 1:
        events["resets"] += bool(engine.reset_prefix_cache(reset_running_requests=number % 2 == 0))
    rig.finish()


def _count_preemptions(rig: Any, events: Counter[str]) -> Callable[[], None]:
    scheduler = rig.core.scheduler
    preempt = scheduler._preempt_request

    def counted(request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        events["preemptions"] += not drop_stale_output  # healing and resets drop it
        preempt(request, timestamp, drop_stale_output)

    scheduler._preempt_request = counted
    return lambda: vars(scheduler).pop("_preempt_request")


def actions_of(rig: Any) -> Counter[str]:
    """How often each action had each outcome."""
    return Counter(
        {
            f"{action.value} {outcome.value}": count
            for action, outcomes in rig.canary.healing.counts.items()
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
    except KeyError:  # it waits
        return []


def false_finding(block: int) -> Any:
    """A finding of the patrol that is none."""
    from canary_obs.records import Violation
    from canary_obs.vocabulary import Part, Phase, Reason

    return Violation(
        phase=Phase.PATROL, reason=Reason.KV_DATA, group="full", part=Part.K, step=1, event=1,
        slot=block * 32, position=None, request=None, expected=None, actual=None, lag_steps=0, time_ns=0,
    )  # fmt: skip


def main(runner: str, actions: int, result: Path, seconds: float = 1e9) -> int:
    """Write what happened, after so many actions or seconds."""
    prepare(runner)
    from tests.engines.vllm.real.models import make_model
    from tests.engines.vllm.real.rig import Rig

    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(make_model(Path(folder), "llama"), **ENGINE | (ON_GPU if on_gpu() else {}))
        until = time.monotonic() + seconds
        enough = lambda done: done.total() >= actions or time.monotonic() > until  # noqa: E731
        found = {"runner": runner} | endure(rig, enough)
        rig.close()
    result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return int(not found["references_as_before"] or bool(found["observer_faults"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *map(float, sys.argv[4:])))
