"""Tiny models with random weights for pools that the models of vLLM's tests do not have in SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.engines.sglang.real import several_drafts
from tests.engines.vllm.real.models import make_model as shared_model

WINDOW = 64
_COMMON: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
    "num_attention_heads": 4, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def make_model(root: Path, name: str) -> Path:
    """A model directory, built on first use."""
    folder = root / name
    if name == several_drafts.MODEL:
        if not folder.exists():
            several_drafts.make_model(folder)
        return folder
    if name not in _BUILDERS:
        return shared_model(root, name)
    if not folder.exists():
        torch.manual_seed(0)
        model, more = _BUILDERS[name]()
        model.to(torch.float32).save_pretrained(folder)
        settings = folder / "config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text("utf-8")) | more), "utf-8")
        if name == "next tokens":
            _add_draft_layer(folder)
    return folder


def make_draft(root: Path, name: str) -> Path:
    """An EAGLE head for the model "llama", built on first use: one layer, random weights.

    `name`: "eagle" takes the embedding and the last hidden state; "eagle3" those of three layers.
    """
    from safetensors.torch import save_file

    folder = root / name
    if folder.exists():
        return folder
    third = name == "eagle3"
    layer = "midlayer." if third else "layers.0."
    hidden, inner, query, key = 128, 256, 4 * 32, 2 * 32
    wide = 2 * hidden if third else hidden
    shapes = {
        "fc": (hidden, (3 if third else 2) * hidden), f"{layer}self_attn.q_proj": (query, wide),
        f"{layer}self_attn.k_proj": (key, wide), f"{layer}self_attn.v_proj": (key, wide),
        f"{layer}self_attn.o_proj": (hidden, query), f"{layer}mlp.gate_proj": (inner, hidden),
        f"{layer}mlp.up_proj": (inner, hidden), f"{layer}mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    norms = ["post_attention_layernorm"] + (["input_layernorm", "hidden_norm"] if third else [])
    torch.manual_seed(1)
    weights = {f"{part}.weight": torch.randn(shape) * 0.05 for part, shape in shapes.items()}
    weights |= {f"{layer}{norm}.weight": torch.ones(hidden) for norm in norms}
    config = _COMMON | {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLMEagle"],
        "model_type": "llama", "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 32,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32",
        "tie_word_embeddings": False,
    }  # fmt: skip
    if third:
        count = _COMMON["vocab_size"]
        weights |= {"norm.weight": torch.ones(hidden), "lm_head.weight": torch.randn(count, hidden) * 0.05}
        weights |= {"d2t": torch.zeros(count, dtype=torch.int64), "t2d": torch.ones(count, dtype=torch.bool)}
        config["draft_vocab_size"] = count
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def _latent() -> Any:
    """MLA: one latent vector per token and layer."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        num_hidden_layers=3, num_key_value_heads=4, kv_lora_rank=64, q_lora_rank=None, qk_rope_head_dim=16,
        qk_nope_head_dim=32, v_head_dim=32, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        first_k_dense_replace=3, topk_method="greedy", n_group=1, topk_group=1, **_COMMON,
    )  # fmt: skip
    config.rope_parameters = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 2048,
        "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
    }  # fmt: skip
    more = {"moe_layer_freq": 1, "scoring_func": "softmax", "seq_aux": True, "ep_size": 1}
    return DeepseekV2ForCausalLM(config), more


def _windows() -> Any:
    """Sliding windows of 64 tokens in two layers of three."""
    from transformers import MellumConfig, MellumForCausalLM

    kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 2
    config = MellumConfig(
        num_hidden_layers=6, num_key_value_heads=2, head_dim=32, sliding_window=WINDOW, num_experts=4,
        num_experts_per_tok=2, mlp_layer_types=["dense"] * 6, layer_types=kinds, **_COMMON,
    )  # fmt: skip
    return MellumForCausalLM(config), {}


def _states() -> Any:
    """Three layers of linear attention, which keep a state per request, and a full one."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        num_hidden_layers=4, num_key_value_heads=2, head_dim=32, linear_num_key_heads=2,
        linear_num_value_heads=6, linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4,
        num_experts=4, num_experts_per_tok=2, shared_expert_intermediate_size=64, decoder_sparse_step=1,
        full_attention_interval=4, **_COMMON,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config), {"full_attention_interval": 4}


def _next_tokens() -> Any:
    """One more layer, which drafts the next tokens (MTP): `_add_draft_layer` adds its weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(num_hidden_layers=3, num_key_value_heads=2, tie_word_embeddings=False, **_COMMON)
    return Qwen2ForCausalLM(config), {
        "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "head_dim": 32
    }  # fmt: skip


def _add_draft_layer(folder: Path) -> None:
    """Random weights of MiMo's layer for the next tokens."""
    from safetensors.torch import load_file, save_file

    file, hidden = folder / "model.safetensors", _COMMON["hidden_size"]
    weights = load_file(file)
    own = "model.mtp_layers.0."
    made = {
        name.replace("model.layers.0.", own): torch.randn_like(held) * held.std().nan_to_num(0) + held.mean()
        for name, held in weights.items()
        if name.startswith("model.layers.0.")
    }
    norms = "token_layernorm", "hidden_layernorm", "final_layernorm"
    made |= {f"{own}{norm}.weight": torch.ones(hidden) for norm in norms}
    made[f"{own}input_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.05
    save_file(weights | made, file, {"format": "pt"})


_BUILDERS = {"latent": _latent, "next tokens": _next_tokens, "states": _states, "windows": _windows}
