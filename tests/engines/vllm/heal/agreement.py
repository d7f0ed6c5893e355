"""What a dry run says of a fault, and `protect` does about the same fault, on a real vLLM.

python -m tests.engines.vllm.heal.agreement V1|V2 FAULTS RESULT.json [SECONDS]

One fault in each of two runs that are alike until healing acts. The file grows by each pair, and goes on
where an earlier call ended. Exit code 1 when an action of the first step in which there were any differs.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from bisect import bisect
from pathlib import Path
from typing import Any

from tests.engines.vllm.heal.program import ENGINE, prepare

_REQUESTS, _TOKENS, _FIRST = 10, 20, 100
_PATROLLED = 2 / 3  # of the steps


def pair(rig: Any, seed: int) -> dict[str, Any]:
    """Actions of the first step in which there were any, and of all later ones, under both policies."""
    from dataclasses import replace

    from canary_obs.vocabulary import HealPolicy
    from tests.engines.vllm.heal.faults import Faults
    from tests.engines.vllm.heal.requests import asks
    from tests.engines.vllm.heal.serve import serve, under

    class OfThisRun(Faults):
        """What a block held before says whether a finding is new."""

        def _other_block(self) -> int:
            return self._draw.choice(self._used())

    requests = [replace(ask, tokens=min(ask.tokens, _TOKENS)) for ask in asks(_REQUESTS, seed)]
    found: dict[str, Any] = {"seed": seed}
    for policy, first, later in (
        (HealPolicy.DRY_RUN, "said", "said_later"), (HealPolicy.PROTECT, "done", "done_later"),
    ):  # fmt: skip
        under(rig, policy)
        _in_order(rig)
        _from_the_start(rig.canary.patrol)
        log = rig.canary.counter_reader.log  # the same words in the same slot are the same finding
        log._findings._seen_at.clear()
        heals: list[Any] = []
        began, draw, send = list[int](), random.Random(seed), rig.canary.healing._send
        rig.canary.healing._send = heals.extend

        def before_step(step: int) -> None:
            began.append(time.time_ns())  # noqa: B023
            rig.canary.patrol._credit = 1.0 if draw.random() < _PATROLLED else -1e15  # noqa: B023

        try:
            served = serve(rig, requests, seed=seed, kind=OfThisRun, most=1, before_step=before_step)
        finally:
            rig.canary.healing._send = send
        # What is said in a step is sent after it, or in it where the engine comes to rest.
        what = [_action(bisect(began, heal.time_ns) - 1, heal) for heal in heals]
        found[first] = [one for one in what if one[0] == what[0][0]]
        found[later] = [one for one in what if one[0] != what[0][0]]
        found.setdefault("fault", served.planted)
        assert (served.planted, served.faults, served.limited) == (found["fault"], {}, None)
    return found


def _in_order(rig: Any) -> None:
    """Let an idle engine give out its blocks by their numbers, as a new one does."""
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    pool = rig.core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    pool.free_block_queue = FreeKVCacheBlockQueue(pool.blocks[1:])


def _from_the_start(patrol: Any) -> None:
    """Let the patrol begin with the first slots, in the first step that it has time in."""
    patrol._cursor = patrol._checked = 0
    patrol._credit = -1e15


def _action(step: int, heal: Any) -> list[Any]:
    request = None if heal.request is None else heal.request.rsplit("-", 1)[0]
    reason = None if heal.reason is None else heal.reason.value
    return [step, heal.action.value, heal.group, heal.block, request, heal.blocks, heal.forwards, reason]


def main(runner: str, count: int, result: Path, seconds: float = 86_400.0) -> int:
    """Write what was found after so many faults that were acted upon, or seconds."""
    until = time.monotonic() + seconds
    # What is found by the clock is found in another step.
    os.environ.update(
        KV_CANARY_PATROL_BUDGET="1B/s", KV_CANARY_IDLE_SWEEP="false", KV_CANARY_BUSY_SWEEP="false"
    )
    prepare(runner)
    from canary_obs.healing.quarantine import RepeatedDamage
    from tests.engines.vllm.real.models import make_model
    from tests.engines.vllm.real.rig import Rig

    # A block that is damaged under both policies is not damaged again.
    RepeatedDamage.again = lambda *_: False  # type: ignore[method-assign]
    pairs: list[dict[str, Any]] = json.loads(result.read_text())["pairs"] if result.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(make_model(Path(folder), "llama"), **ENGINE)
        rig.adapter.hooks.idle_thread.stop()  # it patrols by the clock
        while (acted := _acted(pairs)) < count and time.monotonic() < until:
            pairs.append(pair(rig, _FIRST + len(pairs)))
            acted, same = (
                _acted(pairs),
                sum(bool(one["done"]) and one["said"] == one["done"] for one in pairs),
            )
            so_far = {"runner": runner, "faults": len(pairs), "acted_upon": acted, "same": same}
            later = {"said_later": sum(bool(one["said_later"]) for one in pairs)}
            later["done_later"] = sum(bool(one["done_later"]) for one in pairs)
            result.write_text(
                json.dumps(so_far | later | {"pairs": pairs}, indent=1) + "\n", encoding="utf-8"
            )
            print(so_far | later, flush=True)
        rig.close()
    return int(any(one["said"] != one["done"] for one in pairs))


def _acted(pairs: list[dict[str, Any]]) -> int:
    return sum(bool(one["done"] or one["said"]) for one in pairs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *map(float, sys.argv[4:])))
