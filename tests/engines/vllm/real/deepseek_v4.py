"""Run as a program: DeepSeek-V4 as vLLM runs it on CPUs, with a canary.

usage: deepseek_v4.py FOLDER RESULTS.json

Stand-ins: Triton's interpreter makes the metadata, all but that of windows, experts are computed without AMX,
and a planner that no CPU runs answers for two kinds of layers that vLLM 0.32 forgot.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engines.vllm.real.interpreted import stand_in_driver

BLOCKS = 600
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
    launch, compared = sparse_swa.ComputeSWAIndicesAndLensKernel.__call__, set()

    def find_windows(kernel: Any, indices: Any, lens: Any, *given: Any, **named: Any) -> None:
        window_slots(indices, lens, *given, **named)
        tokens = named["num_tokens"]
        if (tokens > 1) not in compared:
            compared.add(tokens > 1)
            found = indices[:tokens].clone(), lens[:tokens].clone()
            launch(kernel, indices, lens, *given, **named)
            assert torch.equal(found[0], indices[:tokens])
            assert torch.equal(found[1], lens[:tokens])

    sparse_swa.ComputeSWAIndicesAndLensKernel.__call__ = find_windows


def window_slots(
    indices: Any, lens: Any, window: int, width: int, _left: Any, _right: Any, starts: Any, lengths: Any,
    requests: Any, valid: Any, table: Any, size: int, replayed: Any, *, num_tokens: int, token_offset: int,
    has_image: bool = False,
) -> None:  # fmt: skip
    """As vLLM's kernel, for all tokens at once: in the interpreter it takes two thirds of the time of all."""
    import torch

    assert not has_image
    token = torch.arange(token_offset, token_offset + num_tokens)
    real = valid[token]
    row = torch.where(real, requests[token], 0)
    position = lengths[row] - starts[row + 1] + token
    first = torch.maximum((position - window + 1).clamp(min=0), replayed[row])
    lens[:num_tokens] = torch.where(real, position + 1 - first, 0)
    offset = torch.arange(width)
    inside = offset < lens[:num_tokens, None]
    place = torch.where(inside, first[:, None] + offset, 0)
    slots = table[row[:, None], place // size] * size + place % size
    indices.flatten(1)[:num_tokens, :width] = torch.where(inside, slots, -1)


def make(folder: Path) -> Any:
    from tests.engines.vllm.real.rig import Rig

    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return Rig(
        folder, skip_tokenizer_init=True, load_format="dummy", max_num_seqs=4, max_num_batched_tokens=192,
        kv_cache_dtype="fp8", dtype="bfloat16", num_gpu_blocks_override=BLOCKS, block_size=None,
    )  # fmt: skip


def storm(rig: Any) -> dict[str, Any]:
    """Prompts that share prefixes, in chunks; some are aborted, and some preempted, for lack of blocks."""
    from tests.engines.vllm.real.rig import prompts

    scheduler, engine = rig.core.scheduler, rig.llm.llm_engine
    pool, schedule, answers, preempted = scheduler.kv_cache_manager.block_pool, scheduler.schedule, {}, []

    def counted(*given: Any) -> Any:
        output = schedule(*given)
        preempted.extend(output.preempted_req_ids or ())
        return output

    scheduler.schedule = counted
    for turn in range(2):
        asked = {f"{turn}-{at}": one for at, one in enumerate(prompts(6, shared=530, groups=2))}
        asked |= {f"{turn}-b{at}": one for at, one in enumerate(prompts(2, seed=turn, shared=3 + 126 * turn))}
        rig.start(asked, 20)
        for step in range(400):
            if not engine.has_unfinished_requests():
                break
            if step == 9:
                engine.abort_request([f"{turn}-1", f"{turn}-b0"])
            if step == 12:
                held = pool.get_new_blocks(pool.get_num_free_blocks() - 1)
            if step == 22:
                pool.free_blocks(held)
            for output in engine.step():
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
    scheduler.schedule = schedule
    return {"answers": answers, "preempted": len(preempted)}


def run(folder: Path) -> dict[str, Any]:
    """A storm with the canary and one without; then a bit flips in each kind of cache."""
    from canary_obs.runtime.report.snapshot import group_counters
    from canary_obs.vocabulary import Phase

    rig = make(folder)
    result = storm(rig)
    result |= {
        "groups": {group.view.name: group.view.window for group in rig.adapter.vllm_groups},
        "clean": [str(found) for found in rig.settle()], "checks": rig.checks(),
        "coverage": rig.canary.state.coverage, "verdict": [str(each) for each in rig.canary.verdict()[1]],
    }  # fmt: skip
    counters = group_counters(rig.canary.state, rig.canary.counter_reader)
    result["verified"] = {
        name: min(own.verified.get(phase, 0) for phase in (Phase.HEAD, Phase.TAIL, Phase.SWEEP))
        for name, own in counters.items()
    }
    result["hits"] = rig.adapter.prefix_hits()
    result["compared"] = {name: own.gap for name, own in rig.adapter.compared_tables().items()}
    result["found"] = {group.view.name: flips(rig, group) for group in rig.adapter.vllm_groups}
    rig.close()
    os.environ["KV_CANARY_MODE"] = "none"
    plain = make(folder)
    result["plain"] = storm(plain)
    plain.close()
    return result


def flips(rig: Any, group: Any) -> list[list[str]]:
    """What is found of a bit in each run of bytes (elements, scales) of a slot in the prefix cache."""
    from canary_obs.runtime.device.byte_address import locate_byte

    cached = rig.adapter.cached_blocks.cached(group.view.name, unlocked_only=True)
    slot, found = int(cached.slots[len(cached.slots) // 2]), []
    for source in group.view.sources:
        with rig.at_rest():
            locate_byte(source, slot, source.head_bytes - 2).flip(4)
            rig.settle()
            locate_byte(source, slot, source.head_bytes - 2).flip(4)
        found.append(sorted({f"{one.group} {one.slot - slot} {one.reason}" for one in rig.found}))
        rig.found.clear()
    return found


if __name__ == "__main__":
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER="0", KV_CANARY_MODE="log")
    stand_in_driver()
    stand_in()
    Path(sys.argv[2]).write_text(json.dumps(run(Path(sys.argv[1]))))
