"""Run as a program: DeepSeek-V4 as vLLM runs it on CPUs, with a canary.

usage: deepseek_v4.py FOLDER RESULTS.json

Stand-ins: Triton's interpreter makes the metadata, experts are computed without AMX, and a planner that no
CPU runs answers for two kinds of layers that vLLM 0.32 forgot.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engines.vllm.real.interpreted import stand_in_driver

BLOCKS, BLOCK, DATA = 600, 64, 576  # of a window's page: tokens, bytes of one without its scales
_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16",
    "vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 128, "o_lora_rank": 64,
    "o_groups": 2, "sliding_window": 128, "compress_ratios": [1, 4, 128], "index_topk": 512,
    "index_n_heads": 8, "index_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 6, "moe_intermediate_size": 256, "norm_topk_prob": True, "num_hash_layers": 1,
    "swiglu_limit": 10.0, "topk_method": "noaux_tc", "hidden_act": "silu", "hc_mult": 4, "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0, "rope_scaling": {
        "type": "yarn", "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1024,
        "beta_fast": 32, "beta_slow": 1, "rope_theta": 10000.0,
    },
}  # fmt: skip


def stand_in() -> None:
    """For what this vLLM has not on a CPU without AMX."""
    import torch

    torch.cpu._is_amx_tile_supported = lambda: True  # else vLLM runs this model without a prefix cache
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.attention.backends.mla import sparse_swa

    cpu_moe.X86CPUUnquantizedExperts.isa = "vec"
    kinds = [getattr(sparse_swa, name) for name in dir(sparse_swa) if name.startswith("_LAYER_TYPE_")]
    cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda *_: dict.fromkeys(kinds)


def run(folder: Path) -> dict[str, Any]:
    """Serve prompts that share a prefix, then flip a bit in a cached row, and one in its scales."""
    from tests.engines.vllm.real.rig import Rig, prompts

    (folder / "config.json").write_text(json.dumps(_CONFIG))
    rig = Rig(
        folder, skip_tokenizer_init=True, load_format="dummy", max_num_seqs=4, max_num_batched_tokens=512,
        kv_cache_dtype="fp8", dtype="bfloat16", num_gpu_blocks_override=BLOCKS, block_size=None,
    )  # fmt: skip
    for seed in range(2):
        rig.generate(prompts(2, seed=seed, shared=300), 4)
    result: dict[str, Any] = {
        "groups": {group.view.name: group.view.window for group in rig.adapter.vllm_groups},
        "clean": [str(found) for found in rig.settle()], "checks": rig.checks(),
        "coverage": rig.canary.state.coverage, "verdict": [str(each) for each in rig.canary.verdict()[1]],
    }  # fmt: skip
    context = rig.runner.compilation_config.static_forward_context
    pages = context["model.layers.1.attn.swa_cache"].kv_cache.view(BLOCKS, -1)
    block = min(rig.adapter.cached_blocks.live_blocks("swa2"))
    found = []
    for place in (5 * DATA + 7, BLOCK * DATA + 5 * 8 + 2):
        with rig.at_rest():
            pages[block, place] ^= 4
            rig.settle()
            pages[block, place] ^= 4
        found.append(sorted({(one.group, one.slot - block * BLOCK, str(one.reason)) for one in rig.found}))
        rig.found.clear()
    rig.close()
    return result | {"found": found}


if __name__ == "__main__":
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    stand_in_driver()
    stand_in()
    Path(sys.argv[2]).write_text(json.dumps(run(Path(sys.argv[1]))))
