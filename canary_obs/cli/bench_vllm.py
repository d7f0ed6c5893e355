"""`canary-obs bench vllm`: paired step times of a tiny vLLM with the canary attached and detached."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.cli.paired import compare, show
from canary_obs.config import IN_PROCESS
from canary_obs.errors import UnsupportedEngine

_TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPlan:
    """What the command line asked for."""

    blocks: int
    block_steps: int
    requests: int
    prompt: int
    seed: int
    json: bool


class TinyVllm:
    """vLLM in this process with a generated model: random weights, token ids for prompts."""

    def __init__(self, folder: Path, requests: int, seed: int) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_LOGGING_LEVEL", "ERROR")):
            os.environ.setdefault(name, value)
        from vllm import LLM

        (folder / "config.json").write_text(json.dumps(_TINY))
        llm = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="float32",
            max_model_len=2048, max_num_seqs=requests, enforce_eager=True, num_gpu_blocks_override=2000,
            block_size=32, gpu_memory_utilization=0.1, disable_log_stats=True, seed=seed,
        )  # fmt: skip
        self.engine = llm.llm_engine
        core: Any = self.engine.engine_core
        self.core = core.engine_core
        self.worker = self.core.model_executor.driver_worker.worker
        self._draw = random.Random(seed)
        self._names = 0

    def ask(self, prompt: list[int], tokens: int) -> None:
        """Queue a request."""
        from vllm import SamplingParams

        self._names += 1
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(f"request-{self._names}", {"prompt_token_ids": prompt}, sampling)

    def prompt(self, length: int) -> list[int]:
        """Random token ids."""
        return [self._draw.randrange(4, _TINY["vocab_size"]) for _ in range(length)]

    def steps(self, count: int) -> float:
        """Seconds spent in so many engine steps."""
        started = time.perf_counter()
        for _ in range(count):
            self.engine.step()
        return time.perf_counter() - started


def run_vllm(plan: VllmPlan) -> int:
    """The same requests again and again, canary attached and detached in turn; decode steps are timed."""
    os.environ |= {"KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": IN_PROCESS}
    pairs: list[tuple[float, float]] = []
    overhead = dict.fromkeys(("head", "tail", "sweep", "patrol", "pump"), 0.0)
    with TemporaryDirectory() as folder:
        tiny = TinyVllm(Path(folder), plan.requests, plan.seed)
        prompts = [tiny.prompt(plan.prompt) for _ in range(plan.requests)]
        draw = random.Random(plan.seed)
        violations = 0
        for number in range(plan.blocks + 1):
            order = [False, True] if draw.random() < 0.5 else [True, False]
            times = {
                protected: _block(tiny, plan, prompts, overhead, protected=protected) for protected in order
            }
            if number:  # the first pair warms up
                pairs.append((times[False][0], times[True][0]))
                violations += times[True][1]
            else:
                overhead = dict.fromkeys(overhead, 0.0)
        tiny.core.shutdown()
    result: dict[str, object] = {"requests": plan.requests, "prompt": plan.prompt}
    result |= compare(pairs, plan.block_steps, plan.seed)
    steps = plan.blocks * plan.block_steps
    result["overhead_ms"] = {hook: round(1e3 * spent / steps, 4) for hook, spent in overhead.items()}
    result["violations"] = violations
    show("vLLM, mode log (defaults) against no canary, interleaved pairs", result, as_json=plan.json)
    return 0


def _block(
    tiny: TinyVllm, plan: VllmPlan, prompts: list[list[int]], overhead: dict[str, float], *, protected: bool
) -> tuple[float, int]:
    """Seconds of the timed steps, violations."""
    from canary_obs.engines.vllm.worker import protect, release, runtime_of

    release(tiny.worker)
    tiny.core.reset_prefix_cache()
    if protected:
        protect(tiny.worker)
    canary = runtime_of(tiny.worker)
    if protected and canary is None:
        raise UnsupportedEngine("the worker was not protected; its log says why")
    prefill = -(-plan.requests * plan.prompt // 2048) + 2
    for prompt in prompts:
        tiny.ask(prompt, plan.block_steps + 2 * prefill)
    tiny.steps(prefill)
    before = dict(canary.overhead) if canary else {}
    seconds = tiny.steps(plan.block_steps)
    for hook, spent in before.items():
        overhead[hook] += canary.overhead[hook] - spent if canary else 0.0
    while tiny.engine.has_unfinished_requests():
        tiny.steps(1)
    return seconds, canary.pump.violations if canary else 0
