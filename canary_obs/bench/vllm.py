"""`canary-obs bench vllm`: paired step times of a tiny vLLM with the canary attached and detached."""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.bench.statistics import compare, exit_code, show
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Seconds of one block's timed steps, and what of them was spent where."""

    seconds: float
    schedule: float  # vLLM's scheduler, with or without our block events
    execute: float  # the worker's execute_model, with or without the canary around it
    hooks: dict[str, float]  # what the canary says it spent
    violations: int
    faults: int


def run_vllm(plan: VllmPlan) -> int:
    """The same requests again and again, canary attached and detached in turn; decode steps are timed."""
    os.environ |= {"KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": IN_PROCESS}
    blocks: list[tuple[_Block, _Block]] = []
    with TemporaryDirectory() as folder:
        tiny = TinyVllm(Path(folder), plan.requests, plan.seed)
        watch = _Stopwatch(tiny)
        prompts = [tiny.prompt(plan.prompt) for _ in range(plan.requests)]
        draw = random.Random(plan.seed)
        for _ in range(plan.blocks + 1):
            order = [False, True] if draw.random() < 0.5 else [True, False]
            pair = {protected: _block(tiny, plan, prompts, watch, protected=protected) for protected in order}
            blocks.append((pair[False], pair[True]))
        tiny.core.shutdown()
    del blocks[0]  # the first pair warms up
    result: dict[str, object] = {"requests": plan.requests, "prompt": plan.prompt}
    pairs = [(none.seconds, log.seconds) for none, log in blocks]
    result |= compare(pairs, plan.block_steps, plan.seed) | _account(blocks, plan.block_steps)
    violations = result["violations"] = sum(log.violations for _, log in blocks)
    faults = result["observer_faults"] = sum(log.faults for _, log in blocks)
    show("vLLM, mode log (defaults) against no canary, interleaved pairs", result, as_json=plan.json)
    return exit_code(violations=violations, observer_faults=faults)


def _account(blocks: list[tuple[_Block, _Block]], steps: int) -> dict[str, object]:
    """Where a step's additional milliseconds went: medians over pairs, which need not add up exactly."""

    def more(spent: Callable[[_Block], float]) -> float:
        return statistics.median(spent(log) - spent(none) for none, log in blocks)

    found = {hook: statistics.median(log.hooks[hook] for _, log in blocks) for hook in blocks[0][1].hooks}
    hooks = sum(found.values())
    found["scheduler"] = more(lambda block: block.schedule)
    # Not in our code, but not there without us: caches that our work displaced, threads that wait.
    found["execute_model beyond hooks"] = more(lambda block: block.execute) - hooks
    found["elsewhere"] = more(lambda block: block.seconds - block.schedule - block.execute)
    none = statistics.median(block.seconds for block, _ in blocks)
    return {
        "added_ms": round(1e3 * more(lambda block: block.seconds) / steps, 4),
        "added_ms_by_part": {part: round(1e3 * spent / steps, 4) for part, spent in found.items()},
        "added_share_by_part": {part: round(spent / none, 4) for part, spent in found.items()},
    }


class _Stopwatch:
    """Adds up the seconds in the scheduler and in the worker, whoever wraps what they call."""

    def __init__(self, tiny: TinyVllm) -> None:
        self.seconds = {"schedule": 0.0, "execute_model": 0.0}
        for owner, name in ((tiny.core.scheduler, "schedule"), (tiny.worker, "execute_model")):
            setattr(owner, name, self._timed(owner, name))

    def _timed(self, owner: Any, name: str) -> Callable[..., Any]:
        def method(*given: Any, **named: Any) -> Any:
            started = time.perf_counter()
            # By its class, each time: the plugin comes and goes.
            result = getattr(type(owner), name)(owner, *given, **named)
            self.seconds[name] += time.perf_counter() - started
            return result

        return method


def _block(
    tiny: TinyVllm, plan: VllmPlan, prompts: list[list[int]], watch: _Stopwatch, *, protected: bool
) -> _Block:
    from canary_obs.engines.vllm import plugin
    from canary_obs.engines.vllm.worker import attach_to_worker, detach_from_worker, runtime_of

    detach_from_worker(tiny.worker)
    plugin.unregister()
    tiny.core.reset_prefix_cache()
    if protected:
        plugin.register()
        attach_to_worker(tiny.worker)
    canary = runtime_of(tiny.worker)
    if protected and canary is None:
        raise UnsupportedEngine("the worker was not protected; its log says why")
    prefill = -(-plan.requests * plan.prompt // 2048) + 2
    for prompt in prompts:
        tiny.ask(prompt, plan.block_steps + 2 * prefill)
    tiny.steps(prefill)
    before = dict(canary.overhead) if canary else {}
    instrumented = dict(watch.seconds)
    seconds = tiny.steps(plan.block_steps)
    after = dict(canary.overhead) if canary else {}
    spent = {name: total - instrumented[name] for name, total in watch.seconds.items()}
    while tiny.engine.has_unfinished_requests():
        tiny.steps(1)
    return _Block(
        seconds=seconds, schedule=spent["schedule"], execute=spent["execute_model"],
        hooks={hook: total - before[hook] for hook, total in after.items()},
        violations=canary.counter_reader.violations if canary else 0,
        faults=canary.health.faults.total() if canary else 0,
    )  # fmt: skip
