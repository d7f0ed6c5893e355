"""What each policy costs without damage: python -m tests.engines.vllm.heal.speed V1 ROUNDS RESULT [SHAPE]

The same requests under every policy in turn, each round in another order, beside those of `off` in the same
round. With HEAL_DEVICE=cuda on a GPU. Exit code 1 when answers differ or anything was healed. With a shape of
`canary-obs bench vllm-load` (8b, small, tiny) its loads `decode`, `single` and `mixed` run instead.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.engines.vllm.heal.program import ENGINE, ON_GPU, engine_of, on_gpu, prepare
from tests.engines.vllm.heal.requests import asks

_REQUESTS, _TOKENS = 48, 40
_LOADS = "decode", "single", "mixed"
_LOAD = {
    "requests": 32, "context": 1024, "steps": 96, "prefill": 4096, "prefills": 1, "mixed": 64, "short": 64,
}  # fmt: skip
_LOAD_OF_A_CPU = _LOAD | {"requests": 4, "context": 128, "steps": 16, "prefill": 256, "mixed": 8, "short": 8}


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
        "ratio_to_off": _all_ratios(times),
    }  # fmt: skip


def measure_shape(shape: str, rounds: int) -> dict[str, Any]:
    """The same of a model of this shape, by load: of its seconds, and of its median inter-token latency."""
    from canary_obs.bench.vllm_workloads import LoadedVllm, LoadPlan, fill_pool, run_workload
    from canary_obs.demo.in_process_vllm import InProcessVllm
    from canary_obs.engines.vllm.worker import runtime_of
    from canary_obs.vocabulary import HealPolicy

    on_gpu = torch.cuda.is_available()
    plan = LoadPlan(**(_LOAD if on_gpu else _LOAD_OF_A_CPU))
    blocks = 13 * plan.requests * plan.decoding_length(plan.requests, plan.context) // 160
    with tempfile.TemporaryDirectory() as folder:
        vllm = InProcessVllm(
            Path(folder), shape, 1, enable_prefix_caching=True, max_num_seqs=plan.requests,
            max_model_len=plan.context + plan.steps + 2 * plan.requests + 32,
            max_num_batched_tokens=plan.prefill, num_gpu_blocks_override=blocks,
            block_size=16 if on_gpu else 32, gpu_memory_utilization=0.85 if on_gpu else 0.1,
        )  # fmt: skip
        canary = runtime_of(vllm.worker)
        assert canary is not None, "the engine is protected"
        engine = LoadedVllm(vllm=vllm, clocks=lambda: canary.overhead)
        fill_pool(vllm, plan, 2)
        before, draw = canary.healing.counts, random.Random(1)
        times: dict[str, dict[HealPolicy, list[tuple[float, float]]]] = {}
        for number in range(rounds + 1):
            for policy in draw.sample(list(HealPolicy), len(HealPolicy)):
                canary.healing.choose(policy)
                vllm.core.reset_prefix_cache()
                run_workload("short", engine, plan, 0)  # meanwhile the scheduler hears of it
                assert canary.healing.status.effective is policy, canary.healing.status
                for load in _LOADS if number else _LOADS[:1]:  # the first round warms up
                    answer = run_workload(load, engine, plan, number)
                    if number:
                        spent = answer["seconds"], statistics.median(answer["itl_ms"])
                        times.setdefault(load, {one: [] for one in HealPolicy})[policy].append(spent)
        found = {
            "rounds": rounds, "shape": shape, "load": asdict(plan), "engine": vllm.description(),
            "healed": canary.healing.counts != before, "violations": canary.counter_reader.violations,
            "seconds_of_off": {
                load: round(statistics.median(wall for wall, _ in spent[HealPolicy.OFF]), 4)
                for load, spent in times.items()
            },
            "ratio_to_off": {load: _all_ratios(spent, ("wall", "itl_p50")) for load, spent in times.items()},
        }  # fmt: skip
        vllm.shutdown()
    return found


def _all_ratios(
    times: dict[Any, list[tuple[float, float]]], columns: tuple[str, str] = ("wall", "thread_cpu")
) -> dict[str, dict[str, list[float]]]:
    return {
        policy.value: _ratios(spent, times[type(policy).OFF], columns)
        for policy, spent in times.items()
        if policy is not type(policy).OFF
    }


def _ratios(
    own: list[tuple[float, float]], off: list[tuple[float, float]], columns: tuple[str, str]
) -> dict[str, list[float]]:
    """Quartiles over rounds."""
    found = {}
    for column, name in enumerate(columns):
        ratios = [mine[column] / other[column] for mine, other in zip(own, off, strict=True)]
        found[name] = [round(value, 4) for value in statistics.quantiles(ratios, n=4)]
    return found


def main(runner: str, rounds: int, result: Path, shape: str | None = None) -> int:
    """Measure one runner."""
    prepare(runner)
    if shape is not None:
        return _tell({"runner": runner} | measure_shape(shape, rounds), result)
    from tests.engines.vllm.real.models import make_model
    from tests.engines.vllm.real.rig import Rig

    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(make_model(Path(folder), "llama"), **ENGINE | (ON_GPU if on_gpu() else {}))
        found = {"runner": runner} | engine_of(rig) | measure(rig, rounds)
        rig.close()
    return _tell(found, result)


def _tell(found: dict[str, Any], result: Path) -> int:
    result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return int(found.get("differing_answers", 0) > 0 or found["healed"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]))
