"""What a storm consists of: one leg per model, runner and way of using the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

HOUR = 3600.0
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
_CONNECTORS = "tests.engines.vllm.real.copying_connector"

# FlashAttention has no float32. The memory is given, because several engines share the GPU while they start.
ON_GPU: dict[str, Any] = {
    "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 30, "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}  # fmt: skip


def _connector(name: str) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_module_path": _CONNECTORS}


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One engine under load."""

    share: float  # of the storm's time
    minimum: float = 0.0  # seconds of a storm of an hour, in proportion of a shorter one
    model: str = "llama"
    engine: dict[str, Any] = field(default_factory=dict)
    draft: str | None = None  # a draft model
    contains: tuple[str, ...] = ()  # events that must have happened besides those of every leg
    prefix_hits: bool = True
    rests: bool = True  # the load stops now and then, so that idle sweeps run
    runner: str = "V1"
    asynchronous: bool = False  # asynchronous scheduling must be on
    prompts: int = 24  # requests that are kept queued or running
    repeats: float = 0.1  # share of prompts that are one token again and again
    devices: tuple[str, ...] = ("cpu", "cuda")
    on_gpu: dict[str, Any] = field(default_factory=dict)  # settings there, besides those of every leg
    states: tuple[str, ...] = ("ok",)  # what the verdict may be
    expected: bool = True  # to be clean; False = its problems do not fail the storm, for this reason:
    reason: str = ""


_PREEMPTED = ("preemptions",)
LEGS = {
    "llama": Leg(share=3, engine={"num_gpu_blocks_override": 400}),
    "pressure": Leg(
        share=3, minimum=600.0, engine={"num_gpu_blocks_override": 60}, contains=_PREEMPTED, rests=False
    ),
    "ngram": Leg(
        share=2,
        engine={"speculative_config": _NGRAM, "async_scheduling": False, "num_gpu_blocks_override": 100},
        contains=("drafts_accepted",),
    ),
    "hybrid": Leg(share=2, model="gemma3", engine={"num_gpu_blocks_override": 80}, contains=_PREEMPTED),
    "states": Leg(
        share=2,
        model="falcon_h1",
        # A prefill chunk must not cross a block of states.
        engine={
            "load_format": "dummy",
            "block_size": None,
            "max_num_batched_tokens": 128,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 30,
        },
        contains=_PREEMPTED,
        prompts=8,
        on_gpu={"max_model_len": 512},  # its blocks hold fewer tokens than on a CPU
    ),
    "sliding": Leg(share=2, model="mistral", engine={"num_gpu_blocks_override": 40}, contains=_PREEMPTED),
    "latent": Leg(
        share=2,
        model="deepseek",
        engine={"attention_backend": "CPU_MLA", "block_size": 16, "num_gpu_blocks_override": 200},
        contains=_PREEMPTED,
        prefix_hits=False,  # vLLM keeps no prefix cache for MLA on CPUs
        devices=("cpu",),
    ),
    "alibi": Leg(
        share=2,
        model="bloom",
        engine={"dtype": "bfloat16", "num_gpu_blocks_override": 100},
        on_gpu={"attention_backend": "TRITON_ATTN"},  # FlashAttention 3 has no ALiBi
        repeats=0.5,  # keys and values of these are the same at every position
    ),
    "connector": Leg(
        share=2,
        engine={"kv_transfer_config": _connector("CopyingConnector"), "num_gpu_blocks_override": 100},
        contains=("connector_loads",),
        devices=("cpu",),
    ),
    "unaligned": Leg(
        share=2,
        engine={"kv_transfer_config": _connector("UnalignedConnector"), "num_gpu_blocks_override": 100},
        contains=("connector_loads",),
        devices=("cpu",),
    ),
    "at_once": Leg(
        share=2,
        engine={"kv_transfer_config": _connector("UnalignedAtOnce"), "num_gpu_blocks_override": 100},
        contains=("connector_loads",),
        devices=("cpu",),
    ),
    "async": Leg(
        share=2,
        engine={"async_scheduling": True, "num_gpu_blocks_override": 60},
        contains=_PREEMPTED,
        asynchronous=True,
    ),
    "async_draft": Leg(
        share=2,
        engine={"async_scheduling": True, "num_gpu_blocks_override": 60, "max_model_len": 512},
        draft="llama_near",
        contains=(*_PREEMPTED, "drafts_accepted"),
        asynchronous=True,
    ),
    "v2": Leg(
        share=2,
        engine={"max_num_seqs": 8, "max_model_len": 512, "num_gpu_blocks_override": 24},
        contains=_PREEMPTED,
        runner="V2",
        prompts=8,
    ),
}


def leg_seconds(names: Iterable[str], total: float) -> dict[str, float]:
    """`total` seconds divided by share; legs whose minimum is longer get that, the others what is left."""
    scale, left, shared = min(1.0, total / HOUR), total, list(names)
    minima = {name: LEGS[name].minimum * scale for name in shared}
    found: dict[str, float] = {}
    while left >= 0 and (short := [name for name in shared if _part(name, shared, left) < minima[name]]):
        for name in short:
            found[name] = minima[name]
            left -= found[name]
            shared.remove(name)
    if left < 0:
        raise ValueError(f"the minimum times of {sorted(found)} are longer than the storm of {total:.0f} s")
    return found | {name: _part(name, shared, left) for name in shared}


def _part(name: str, names: Iterable[str], seconds: float) -> float:
    return seconds * LEGS[name].share / sum(LEGS[other].share for other in names)
