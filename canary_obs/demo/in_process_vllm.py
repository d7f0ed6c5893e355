"""A vLLM engine in this process, driven step by step: generated weights, token ids as prompts."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from importlib.util import find_spec
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
    # 12 of the 48 layers of Qwen3-Next 80B: nine of linear attention, three full ones. Of these, twice as
    # many heads that are half as wide: as many bytes.
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 12,
        "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "norm_topk_prob": True,
        "hidden_size": 2048, "intermediate_size": 5120, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "partial_rotary_factor": 0.25, "rope_theta": 10000000.0, "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024,
    },
}  # fmt: skip
# For CPUs, whose kernels take heads of 128 and bfloat16: three layers of linear attention, and a full one.
SHAPES["qwen3-next-tiny"] = SHAPES["qwen3-next"] | {
    "num_hidden_layers": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "vocab_size": 1024,
}  # fmt: skip
TINY_CONTEXT = 2048  # tokens, prompt and answer
_FIRST_TOKEN = 3  # smaller ids are special tokens
_WEIGHT_STD = 0.02


class InProcessVllm:
    """vLLM's own engine, scheduler and worker, without a process of their own.

    To be protected, the plugin must be registered (or KV_CANARY_MODE set) before it is made.
    """

    def __init__(self, folder: Path, shape: str, seed: int, **engine_args: Any) -> None:
        """Build it from a generated model: `folder` receives its config.json, `shape` is a key of SHAPES.

        `engine_args` go to `vllm.LLM`. Defaults: CUDA graphs and bfloat16 on a GPU, eager float32 on CPUs.
        """
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        (folder / "config.json").write_text(json.dumps(LLAMA | SHAPES[shape]))
        on_gpu = torch.cuda.is_available()
        states = keeps_states(shape)
        defaults: dict[str, Any] = {
            "disable_log_stats": True, "enforce_eager": not on_gpu,
            "dtype": "bfloat16" if on_gpu or states else "float32",
        }  # fmt: skip
        if states and find_spec("flashinfer") is None:  # which vLLM takes on Hopper
            defaults["additional_config"] = {"gdn_prefill_backend": "triton"}
        llm = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, seed=seed,
            **(defaults | engine_args),
        )  # fmt: skip
        self.config = llm.llm_engine.vllm_config
        self.engine = llm.llm_engine
        core: Any = self.engine.engine_core
        self.core = core.engine_core
        self.worker = self.core.model_executor.driver_worker.worker
        self.runner = self.worker.model_runner
        self._random = random.Random(seed)
        self._vocabulary = SHAPES[shape]["vocab_size"]
        self._requests = 0
        draw_weights(self.runner.get_model())

    @property
    def latest_request(self) -> int:
        """Number of the request added last; its id is `request-NUMBER`, the first is 1."""
        return self._requests

    @property
    def token_ids(self) -> tuple[int, int]:
        """The smallest id of a plain token, and the number of ids."""
        return _FIRST_TOKEN, self._vocabulary

    def random_prompts(self, count: int, length: int) -> list[list[int]]:
        """`count` prompts of `length` token ids."""
        return [
            [self._random.randrange(_FIRST_TOKEN, self._vocabulary) for _ in range(length)]
            for _ in range(count)
        ]

    def add_requests(self, prompts: list[list[int]], tokens: int) -> None:
        """Queue requests that answer with exactly `tokens` tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            self._requests += 1
            self.engine.add_request(f"request-{self._requests}", {"prompt_token_ids": prompt}, sampling)

    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self.engine.has_unfinished_requests())

    def run(self, until: Callable[[list[Any]], bool] = lambda _: False) -> None:
        """Step until no request is left, or `until` returns True for a step's outputs."""
        while self.has_work():
            if until(self.engine.step()):
                return

    def run_steps(self, count: int) -> float:
        """Run `count` engine steps; returns their seconds."""
        started = time.perf_counter()
        for _ in range(count):
            self.engine.step()
        return time.perf_counter() - started

    def synchronize(self) -> None:
        """Wait for the device."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def layer_caches(self) -> list[torch.Tensor]:
        """vLLM's own KV tensors, [blocks, heads, block size, K | V], layer by layer; without states."""
        held = [cache for _, cache in self._layer_memory()]
        return [cache for cache in held if isinstance(cache, torch.Tensor)]

    def layer_states(self) -> list[tuple[int, torch.Tensor]]:
        """vLLM's tensors of states, [blocks, ...], each with the number of its group; two of a layer."""
        held = [each for each in self._layer_memory() if not isinstance(each[1], torch.Tensor)]
        return [(number, part) for number, parts in held for part in parts]

    def _layer_memory(self) -> list[tuple[int, Any]]:
        """What each layer keeps, and the number of its group."""
        context = self.config.compilation_config.static_forward_context
        groups = enumerate(self.runner.kv_cache_config.kv_cache_groups)
        return [(number, context[name].kv_cache) for number, group in groups for name in group.layer_names]

    @property
    def attention_group(self) -> int:
        """Number of the group whose layers are `layer_caches`."""
        return next(number for number, cache in self._layer_memory() if isinstance(cache, torch.Tensor))

    def idle_blocks(self, group: int | None = None) -> list[int]:
        """Blocks of the prefix cache that no request uses; None = of `attention_group`."""
        from vllm.v1.core.kv_cache_utils import get_group_id

        wanted = self.attention_group if group is None else group
        pool = self.core.scheduler.kv_cache_manager.block_pool
        idle = [block for block in pool.blocks if block.block_hash is not None and not block.ref_cnt]
        return [block.block_id for block in idle if get_group_id(block.block_hash) == wanted]

    def description(self) -> dict[str, Any]:
        """vLLM's version and the settings that matter to a measurement; JSON values."""
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

    def shutdown(self) -> None:
        """End the engine, as vLLM does."""
        self.core.shutdown()


def keeps_states(shape: str) -> bool:
    """Whether layers of this shape keep a state for each request."""
    return "full_attention_interval" in SHAPES[shape]


def tiny_vllm(folder: Path, requests: int, seed: int) -> InProcessVllm:
    """A vLLM small enough for two CPU cores; at most `requests` of its requests run together."""
    for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_LOGGING_LEVEL", "ERROR")):
        os.environ.setdefault(name, value)
    return InProcessVllm(
        folder, "tiny", seed, dtype="float32", enforce_eager=True, max_model_len=TINY_CONTEXT,
        max_num_seqs=requests, num_gpu_blocks_override=2000, block_size=32, gpu_memory_utilization=0.1,
    )  # fmt: skip


def draw_weights(model: torch.nn.Module) -> None:
    """Random weights. Dummy ones are nearly 0, on which a GPU computes faster than on real ones."""
    with torch.inference_mode():
        for weights in model.parameters():
            if weights.dim() == 1:
                weights.data.fill_(1.0)
            else:
                weights.data.normal_(0.0, _WEIGHT_STD)
