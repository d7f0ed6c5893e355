"""A vLLM in this process that a bench drives step by step: generated weights, token ids as prompts."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    },
    "small": {
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 4096,
    },
}  # fmt: skip
_SPREAD = 0.02  # of the weights


class VllmHost:
    """vLLM's own engine, scheduler and worker; the plugin must be registered before, if it is to be there."""

    def __init__(self, folder: Path, shape: str, seed: int, **engine: Any) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        (folder / "config.json").write_text(json.dumps(LLAMA | SHAPES[shape]))
        on_gpu = torch.cuda.is_available()
        llm = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, seed=seed,
            disable_log_stats=True, enforce_eager=not on_gpu, dtype="bfloat16" if on_gpu else "float32",
            **engine,
        )  # fmt: skip
        self.config = llm.llm_engine.vllm_config
        self.engine = llm.llm_engine
        core: Any = self.engine.engine_core
        self.core = core.engine_core
        self.worker = self.core.model_executor.driver_worker.worker
        self.runner = self.worker.model_runner
        self._draw = random.Random(seed)
        self._vocabulary = SHAPES[shape]["vocab_size"]
        self._names = 0
        _draw_weights(self.runner.get_model())

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Random token ids."""
        return [[self._draw.randrange(3, self._vocabulary) for _ in range(length)] for _ in range(count)]

    def ask(self, prompts: list[list[int]], tokens: int) -> None:
        """Queue requests that answer with so many tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            self._names += 1
            self.engine.add_request(f"request-{self._names}", {"prompt_token_ids": prompt}, sampling)

    def run(self, stop: Callable[[list[Any]], bool] = lambda _: False) -> None:
        """Step until nothing is left to do, or `stop` says so of a step's outputs."""
        while self.engine.has_unfinished_requests():
            if stop(self.engine.step()):
                return

    def rest(self) -> None:
        """Wait for the device."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """From the first step to the last token."""
        self.ask(prompts, tokens)
        started = time.perf_counter()
        self.run()
        return time.perf_counter() - started

    def decode_seconds(
        self, prompts: list[list[int]], steps: int, mark: Callable[[], None]
    ) -> tuple[float, float]:
        """Until all requests decode together; then so many steps of all, `mark` before and after."""
        count, ends = len(prompts), list[float]()

        def stop(outputs: list[Any]) -> bool:
            if len(outputs) == count:
                ends.append(time.perf_counter())
                if len(ends) in (1, steps + 1):
                    mark()
            return len(ends) > steps

        # The first to decode must still be there when the last has decoded so many steps.
        self.ask(prompts, steps + 2 * count + 8)
        started = time.perf_counter()
        self.run(stop)
        filled, decoded = ends[0] - started, ends[-1] - ends[0]
        names = [f"request-{self._names - number}" for number in range(count)]
        self.engine.abort_request(names)
        self.run()
        return filled, decoded

    def layer_caches(self) -> list[torch.Tensor]:
        """KV tensors as vLLM holds them, [blocks, heads, block size, K | V], layer by layer."""
        context = self.config.compilation_config.static_forward_context
        groups = self.runner.kv_cache_config.kv_cache_groups
        return [context[name].kv_cache for group in groups for name in group.layer_names]

    def idle_blocks(self) -> list[int]:
        """Blocks of the prefix cache that no request uses."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        return [block.block_id for block in pool.blocks if block.block_hash is not None and not block.ref_cnt]

    def facts(self) -> dict[str, Any]:
        """What was measured on."""
        import vllm

        cache, compilation = self.layer_caches()[0], self.config.compilation_config
        return {
            "vllm": vllm.__version__,
            "runner": type(self.runner).__module__,
            "async_scheduling": bool(self.config.scheduler_config.async_scheduling),
            "cudagraph_mode": str(compilation.cudagraph_mode),
            "kv_shape": list(cache.shape),
            "kv_stride": list(cache.stride()),
            "kv_dtype": str(cache.dtype),
        }


def _draw_weights(model: torch.nn.Module) -> None:
    """Dummy weights are nearly 0, on which a GPU computes faster than on real ones."""
    with torch.inference_mode():
        for weights in model.parameters():
            if weights.dim() == 1:
                weights.data.fill_(1.0)
            else:
                weights.data.normal_(0.0, _SPREAD)
