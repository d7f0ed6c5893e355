"""What each policy costs without damage: python -m tests.engines.vllm.heal.speed V1 ROUNDS RESULT.json

The same requests under every policy in turn, each round in another order, beside those of `off` in the same
round. With HEAL_DEVICE=cuda on a GPU. Exit code 1 when answers differ or anything was healed.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.engines.vllm.heal.program import ENGINE, ON_GPU, engine_of, on_gpu, prepare
from tests.engines.vllm.heal.requests import asks

_REQUESTS, _TOKENS = 48, 40


def measure(rig: Any, rounds: int) -> dict[str, Any]:
    """Seconds by policy and round, wall and thread CPU, as ratios to `off`."""
    from canary_obs.vocabulary import HealPolicy
    from tests.engines.vllm.heal.serve import under

    prompts = [list(ask.prompt) for ask in asks(_REQUESTS, 5)]
    draw, before = random.Random(1), rig.canary.healing.counts
    times: dict[HealPolicy, list[tuple[float, float]]] = {policy: [] for policy in HealPolicy}
    right, differing = rig.generate(prompts, _TOKENS), 0
    for _ in range(rounds):
        for policy in draw.sample(list(HealPolicy), len(HealPolicy)):
            under(rig, policy)
            began = time.perf_counter(), time.thread_time()
            answers = rig.generate(prompts, _TOKENS)
            times[policy].append((time.perf_counter() - began[0], time.thread_time() - began[1]))
            differing += answers != right
            under(rig, HealPolicy.OFF)
    return {
        "rounds": rounds, "requests": _REQUESTS, "tokens": _TOKENS, "differing_answers": differing,
        "healed": rig.canary.healing.counts != before,
        "seconds_of_off": round(statistics.median(wall for wall, _ in times[HealPolicy.OFF]), 4),
        "ratio_to_off": {
            policy.value: _ratios(times[policy], times[HealPolicy.OFF])
            for policy in HealPolicy
            if policy is not HealPolicy.OFF
        },
    }  # fmt: skip


def _ratios(own: list[tuple[float, float]], off: list[tuple[float, float]]) -> dict[str, list[float]]:
    """Quartiles over rounds."""
    found = {}
    for column, name in enumerate(("wall", "thread_cpu")):
        ratios = [mine[column] / other[column] for mine, other in zip(own, off, strict=True)]
        found[name] = [round(value, 4) for value in statistics.quantiles(ratios, n=4)]
    return found


def main(runner: str, rounds: int, result: Path) -> int:
    """Measure one runner."""
    prepare(runner)
    from tests.engines.vllm.real.models import make_model
    from tests.engines.vllm.real.rig import Rig

    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(make_model(Path(folder), "llama"), **ENGINE | (ON_GPU if on_gpu() else {}))
        found = {"runner": runner} | engine_of(rig) | measure(rig, rounds)
        rig.close()
    result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return int(found["differing_answers"] > 0 or found["healed"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
