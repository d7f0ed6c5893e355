"""SGLang on several GPUs, or other pools there: `python -m tests.gpu.sglang_ranks --tp 2 --output FILE`.

An engine in processes of its own, as in production, serves prompts without a canary, with one, and with one
that injects faults, in each group in turn. Every rank has to say what it has checked, to report nothing
without a fault, and to miss none of them. On a CPU the engine has the hooks of GPUs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from canary_obs.bench.environment import environment
from canary_obs.bench.sglang_engine import engine_settings
from canary_obs.config import ServiceConfig
from canary_obs.demo.in_process_vllm import LLAMA, SHAPES
from canary_obs.hub.hub import Hub
from canary_obs.hub.ranks import violations_of
from canary_obs.records import Snapshot
from canary_obs.transport.listener import ZmqListener
from canary_obs.vocabulary import Phase
from tests.engines.sglang.real.traffic import prompts

ROOT = Path(__file__).parents[2]
ON_GPUS = torch.cuda.is_available()
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 4,
    "hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 64, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 4, "moe_layer_freq": 1, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "scoring_func": "softmax", "routed_scaling_factor": 1.0,
    "norm_topk_prob": False, "vocab_size": 1024, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "ep_size": 1,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "attention_bias": False,
    "rope_scaling": {
        "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "mscale": 0.7,
        "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
TINY_LATENT: dict[str, Any] = LATENT | {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
    "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
# A sliding window in two layers of three.
WINDOWS: dict[str, Any] = {
    "architectures": ["MellumForCausalLM"], "model_type": "mellum", "num_hidden_layers": 6,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2, "mlp_layer_types": ["dense"] * 6,
    "sliding_window": 128, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "norm_topk_prob": True, "num_local_experts": 4,
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": 4096, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "attention_bias": False,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
TINY_WINDOWS: dict[str, Any] = WINDOWS | {
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "sliding_window": 64, "vocab_size": 1024,
}  # fmt: skip
# Three layers of linear attention, whose states are left out on GPUs, and a full one.
STATES: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4,
    "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1, "norm_topk_prob": True, "hidden_size": 512, "intermediate_size": 1024,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 4096,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "bos_token_id": 1,
    "eos_token_id": 2, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
TINY_STATES: dict[str, Any] = STATES | {
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "linear_num_value_heads": 6,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "vocab_size": 1024,
}  # fmt: skip
PERTURB = "real_kv_used=0.1,real_kv_post_forward=0.1,real_kv_unused_cache=0.1,req_to_token=0.05"
OWN = {"latent": (TINY_LATENT, LATENT), "windows": (TINY_WINDOWS, WINDOWS), "states": (TINY_STATES, STATES)}
_TOKENS, _ROUNDS, _REQUESTS = 48, 4, 12
_POOL = 2048  # tokens; all prompts and answers are 4000, so that slots are used again


def serve(folder: Path, settings: dict[str, Any]) -> None:
    """The engine's process: answers of all prompts to `answers.json`, and how many tokens came from the host.

    With a hierarchical cache the prompts come twice: of the first ones, the KV is on the host by then.
    """
    if not ON_GPUS:
        from canary_obs.engines.sglang import adapter, groups
        from tests.engines.sglang.real import linear_attention, stand_ins, streams

        stand_ins.install()
        stand_ins.attention()
        stand_ins.attention_over_data()
        streams.install()
        linear_attention.install()
        adapter.concurrent = lambda device: True
        groups.state_view = linear_attention.refused_on_gpus  # type: ignore[assignment]
        multiprocessing.set_start_method("fork", force=True)  # the processes of its ranks have them, too
        multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(
        model_path=str(folder), max_running_requests=8, chunked_prefill_size=256, context_length=2048,
        max_total_tokens=_POOL, watchdog_timeout=1e6, **(engine_settings(on_gpu=ON_GPUS) | settings),
    )  # fmt: skip
    sampling = {"max_new_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
    found: list[list[int]] = []
    loaded = 0
    for seed in list(range(_ROUNDS)) * (1 + bool(settings.get("enable_hierarchical_cache"))):
        asked = list(prompts(_REQUESTS, seed, longest=280).values())
        answers = engine.generate(input_ids=asked, sampling_params=[dict(sampling) for _ in asked])
        found += [list(answer["output_ids"]) for answer in answers]
        cached = (answer["meta_info"].get("cached_tokens_details") for answer in answers)
        loaded += sum(tokens["host"] for tokens in cached if tokens)
    (folder / "answers.json").write_text(json.dumps({"ids": found, "loaded": loaded}), "utf-8")
    engine.shutdown()


def run(model: dict[str, Any], settings: dict[str, Any], mode: str, group: str = "") -> dict[str, Any]:
    """One engine from its start to its end: its answers, what it loaded, and each rank's last word.

    `group`: that faults are injected into; empty = none are.
    """
    with TemporaryDirectory(prefix="kvc") as name:
        folder, endpoint = Path(name), f"ipc://{name}/s.sock"
        (folder / "config.json").write_text(json.dumps(model), "utf-8")
        hub = Hub(ServiceConfig(endpoint=endpoint))
        listener = ZmqListener(endpoint, hub)
        canary = {"KV_CANARY_MODE": mode, "KV_CANARY_ENDPOINT": endpoint, "KV_CANARY_SWEEP_INTERVAL": "16"}
        if group:
            canary |= {"KV_CANARY_PERTURB": PERTURB, "KV_CANARY_PERTURB_GROUP": group}
            canary["KV_CANARY_PERTURB_ENABLED"] = "true"
        cores = "|".join(str(core % (os.cpu_count() or 1)) for core in range(processes(settings)))
        own = {"HF_HUB_OFFLINE": "1"} if ON_GPUS else {"SGLANG_CPU_OMP_THREADS_BIND": cores}
        command = [sys.executable, "-m", __spec__.name, "--serve", name, "--settings", json.dumps(settings)]
        try:
            subprocess.run(command, env=os.environ | canary | own, cwd=ROOT, check=True, stdout=sys.stderr)
        finally:
            listener.close()
        answers = json.loads((folder / "answers.json").read_text("utf-8"))
        ranks = {rank.identity.rank: said(rank.snapshot) for rank in hub.ranks() if rank.snapshot}
        return {"answers": answers["ids"], "loaded": answers["loaded"], "ranks": ranks}


def processes(settings: dict[str, Any]) -> int:
    """Schedulers of an engine with these settings."""
    replicas = 1 if settings.get("enable_dp_attention") else int(settings["dp_size"])
    return replicas * int(settings["tp_size"]) * int(settings.get("pp_size", 1))


def said(snapshot: Snapshot) -> dict[str, Any]:
    """What a rank has checked and found."""
    phases = Phase.HEAD, Phase.SWEEP, Phase.PATROL
    return {
        "device": snapshot.identity.device,
        "state": snapshot.state.value,
        "reasons": list(snapshot.state_reasons),
        "groups": {
            name: {
                "verified": {phase.value: group.verified[phase] for phase in (Phase.HEAD, Phase.TAIL)},
                "hashed": {phase.value: group.hashed[phase] for phase in phases},
            }
            for name, group in snapshot.groups.items()
        },
        "violations": violations_of(snapshot),
        "observer_faults": sum(snapshot.observer_faults.values()),
        "injected": {
            mode.value: {
                "detected": count.detected, "masked": count.masked, "missed": count.missed, "open": count.open
            }
            for mode, count in snapshot.perturbations.items() if count.injected
        },
    }  # fmt: skip


def problems(clean: dict[int, Any], faulty: dict[str, dict[int, Any]], ranks: int) -> list[str]:
    """What is not as it has to be. `faulty`: by the group that faults were injected into."""
    runs = clean, *faulty.values()
    found = [f"{len(each)} of {ranks} ranks have reported" for each in runs if len(each) != ranks]
    for rank, one in clean.items():
        if one["violations"] or one["observer_faults"] or one["state"] not in ("ok", "degraded"):
            found.append(f"rank {rank} without faults: {one}")
        for name, group in one["groups"].items():
            if min(group["verified"].values()) < 5_000:
                found.append(f"rank {rank} has verified {group['verified']} in {name}")
            if not min(group["hashed"].values()):
                found.append(f"rank {rank} has hashed {group['hashed']} in {name}")
    for name, said_of in faulty.items():
        for rank, one in said_of.items():
            if not one["injected"] or one["observer_faults"]:
                found.append(f"rank {rank} with faults in {name}: {one}")
            for mode, count in one["injected"].items():
                if count["missed"]:
                    found.append(f"rank {rank} has missed {count['missed']} of {mode} in {name}")
    return found


def main() -> int:
    """Exit code 1 = a rank is silent, has reported without a fault, or has missed one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--dp-attention", action="store_true", help="the tensor ranks' attention, by --dp")
    parser.add_argument("--shape", choices=(*SHAPES, *OWN), default="small" if ON_GPUS else "tiny")
    parser.add_argument("--hierarchical", action="store_true", help="a cache in host memory, too; on GPUs")
    parser.add_argument("--attention", default=None, help="SGLang's attention backend")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hierarchical and not ON_GPUS:
        parser.error("--hierarchical needs a GPU: on a CPU SGLang 0.5.23 copies KV by other methods")
    if given.serve is not None:
        serve(given.serve, given.settings)
        return 0
    settings: dict[str, Any] = {"tp_size": given.tp, "dp_size": given.dp}
    if given.pp > 1:
        settings["pp_size"] = given.pp
    if given.hierarchical:
        settings |= {"enable_hierarchical_cache": True, "hicache_write_policy": "write_through"}
    if given.dp_attention:
        settings["enable_dp_attention"] = True
    if given.attention:
        settings["attention_backend"] = given.attention
    if given.shape == "states":
        settings |= {"max_mamba_cache_size": 64} | ({} if ON_GPUS else {"disable_overlap_schedule": True})
    model = OWN[given.shape][ON_GPUS] if given.shape in OWN else LLAMA | SHAPES[given.shape]
    plain, checked = run(model, settings, "none"), run(model, settings, "log")
    groups = {name: None for one in checked["ranks"].values() for name in one["groups"]}
    perturbed = {name: run(model, settings, "log", name)["ranks"] for name in groups}
    wrong = problems(checked["ranks"], perturbed, processes(settings))
    if given.hierarchical and not checked["loaded"]:
        wrong.append("no KV came back from the host")
    result = {
        "environment": environment(),
        "plan": settings | {"shape": given.shape, "perturb": PERTURB},
        # On GPUs a sum's order may depend on what else is in a batch, and so may an answer.
        "answers": {
            "equal": sum(map(list.__eq__, plain["answers"], checked["answers"])),
            "of": len(plain["answers"]),
        },
        "loaded": checked["loaded"],
        "clean": checked["ranks"],
        "perturbed": perturbed,
        "problems": wrong,
    }
    text = json.dumps(result, indent=1)
    if given.output:
        given.output.write_text(text + "\n", "utf-8")
    print(text)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
