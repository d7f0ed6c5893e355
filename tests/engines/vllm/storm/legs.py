"""What a storm consists of: one leg per model, runner and way of using the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
_CONNECTORS = "tests.engines.vllm.real.copying_connector"


def _connector(name: str) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_module_path": _CONNECTORS}


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One engine under load."""

    share: float  # of the storm's time
    model: str = "llama"
    engine: dict[str, Any] = field(default_factory=dict)
    contains: tuple[str, ...] = ()  # events that must have happened besides those of every leg
    prefix_hits: bool = True
    rests: bool = True  # the load stops now and then, so that idle sweeps run
    runner: str = "V1"
    prompts: int = 24  # requests that are kept queued or running
    devices: tuple[str, ...] = ("cpu", "cuda")
    states: tuple[str, ...] = ("ok",)  # what the verdict may be


LEGS = {
    "llama": Leg(share=3, engine={"num_gpu_blocks_override": 400}),
    "pressure": Leg(share=3, engine={"num_gpu_blocks_override": 60}, contains=("preemptions",), rests=False),
    "ngram": Leg(
        share=2,
        engine={"speculative_config": _NGRAM, "async_scheduling": False, "num_gpu_blocks_override": 100},
        contains=("drafts_accepted",),
    ),
    "hybrid": Leg(
        share=2, model="gemma3", engine={"num_gpu_blocks_override": 150}, contains=("preemptions",)
    ),
    "sliding": Leg(share=1, model="mistral", engine={"num_gpu_blocks_override": 80}),
    "latent": Leg(
        share=2,
        model="deepseek",
        engine={"attention_backend": "CPU_MLA", "block_size": 16, "num_gpu_blocks_override": 200},
        prefix_hits=False,  # vLLM keeps no prefix cache for MLA on CPUs
        devices=("cpu",),
    ),
    "connector": Leg(
        share=2,
        engine={"kv_transfer_config": _connector("CopyingConnector"), "num_gpu_blocks_override": 100},
        contains=("connector_loads",),
        devices=("cpu",),
    ),
    "v2": Leg(
        share=2,
        engine={"max_num_seqs": 8, "max_model_len": 512, "num_gpu_blocks_override": 60},
        runner="V2",
        prompts=8,
    ),
}
