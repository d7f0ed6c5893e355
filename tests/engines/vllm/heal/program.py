"""One runner in this process: rounds of requests, each added to the row of its runner and policy in a file.

python -m tests.engines.vllm.heal.program V1 REQUESTS SEED POLICY RESULT.json
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Variables: cpu or cuda; 0 or 1; one of DRAFTS, or nothing.
DEVICE, ASYNCHRONOUS, DRAFTING = "HEAL_DEVICE", "HEAL_ASYNCHRONOUS", "HEAL_DRAFTS"
ROUND = 100  # requests with one seed
ENGINE: dict[str, Any] = {
    "max_num_seqs": 8, "max_model_len": 1024, "max_num_batched_tokens": 256, "block_size": 32,
    "num_gpu_blocks_override": 96,
}  # fmt: skip
# With float32, and its products in full, rounding is far below what the judge calls wrong: as on CPUs.
ON_GPU: dict[str, Any] = {
    "dtype": "float32", "attention_backend": "TRITON_ATTN", "kv_cache_memory_bytes": 1 << 30,
    "enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}  # fmt: skip
DRAFTS: dict[str, tuple[dict[str, Any], str | None]] = {  # settings, and the draft's model
    "ngram": ({"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}, None),
    "eagle": ({"method": "eagle"}, "llama_eagle"),
    "draft_model": ({"method": "draft_model"}, "llama_near"),
}


def prepare(runner: str) -> None:
    """The environment, before vLLM is imported."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_CI_ENV="1", VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1",
        KV_CANARY_LANE_ROWS="1024",  # a block that is damaged whole has 64 findings
        KV_CANARY_MODE="log", KV_CANARY_ENDPOINT="inproc", KV_CANARY_VERIFY_ON_HIT="1",
        VLLM_USE_V2_MODEL_RUNNER=str(int(runner == "V2")),
        VLLM_CPU_OMP_THREADS_BIND="0", OMP_NUM_THREADS="1",  # on shared cores threads wait for each other
    )  # fmt: skip
    if on_gpu():
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
    elif runner == "V2":
        from tests.engines.vllm.real.interpreted import stand_in_driver

        os.environ["TRITON_INTERPRET"] = "1"
        stand_in_driver()


def on_gpu() -> bool:
    """Whether the engine is to run on a GPU. Raises RuntimeError where there is none."""
    wanted = os.environ.get(DEVICE) == "cuda"
    if wanted and not torch.cuda.is_available():
        raise RuntimeError("--device cuda: torch finds no CUDA device")
    return wanted


def run(runner: str, count: int, seed: int, policy: str, result: Path) -> None:
    """Rounds until the row has so many requests; those that the file has already count."""
    prepare(runner)
    from canary_obs.vocabulary import HealPolicy
    from tests.engines.vllm.heal.faults import FalseFindings, Faults
    from tests.engines.vllm.heal.judge import judge
    from tests.engines.vllm.heal.requests import asks
    from tests.engines.vllm.heal.serve import serve, under
    from tests.engines.vllm.heal.table import add_round, round_of, row_in
    from tests.engines.vllm.real.models import make_model
    from tests.engines.vllm.real.rig import Rig, keep_asynchronous

    engine = ENGINE | (ON_GPU if on_gpu() else {})
    if os.environ.get(ASYNCHRONOUS) == "1":
        keep_asynchronous()
        engine["async_scheduling"] = True
    with tempfile.TemporaryDirectory() as folder:
        if drafts := os.environ.get(DRAFTING):
            engine["speculative_config"] = _drafts(drafts, lambda name: make_model(Path(folder), name))
        rig = Rig(make_model(Path(folder), "llama"), **engine)
        while (row := row_in(result, runner, policy)) is None or row["requests"] < count:
            done, rounds = (0, 0) if row is None else (row["requests"], row["rounds"])
            number = seed + rounds
            requests, runs = asks(min(ROUND, count - done), number), []
            plans = [("off", Faults, None), (policy, Faults, None), (policy, Faults, number)]
            if policy != "off":  # which acts on nothing
                plans.append((policy, FalseFindings, number))
            for chosen, kind, faults in plans:
                under(rig, HealPolicy(chosen))
                runs.append(serve(rig, requests, seed=faults, kind=kind))
                under(rig, HealPolicy.OFF)
                judge(rig, requests, runs[0], runs[-1])
            add_round(
                result,
                {"runner": runner, "policy": policy, "seed": seed} | engine_of(rig) | round_of(*runs),
            )
        rig.close()


def _drafts(name: str, made: Callable[[str], Path]) -> dict[str, Any]:
    settings, model = DRAFTS[name]
    return settings | {"num_speculative_tokens": 3} | ({} if model is None else {"model": str(made(model))})


def engine_of(rig: Any) -> dict[str, Any]:
    """What it ran on."""
    import vllm

    config = rig.llm.llm_engine.vllm_config
    device = torch.cuda.get_device_name() if on_gpu() else "cpu"
    return {
        "vllm": vllm.__version__, "device": device, "dtype": str(config.model_config.dtype),
        "asynchronous": bool(config.scheduler_config.async_scheduling),
        "drafts": os.environ.get(DRAFTING) or None,
    }  # fmt: skip


if __name__ == "__main__":
    kind, number, start, named, output = sys.argv[1:]
    run(kind, int(number), int(start), named, Path(output))
