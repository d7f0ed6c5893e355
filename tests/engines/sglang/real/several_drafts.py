"""A tiny MiMo-V2 with three layers for the next tokens, each a draft model of its own, and random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MODEL = "several drafts"
WINDOW = 64
_HIDDEN, _INNER, _VOCABULARY, _LAYERS, _MODELS = 128, 256, 1024, 3, 3
_HEADS, _KV_HEADS, _WIDTH, _VALUE_WIDTH = 4, 2, 32, 16
_CONFIG: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "torch_dtype": "float32",
    "vocab_size": _VOCABULARY, "hidden_size": _HIDDEN, "intermediate_size": _INNER,
    "moe_intermediate_size": 64, "num_hidden_layers": _LAYERS, "max_position_embeddings": 4096,
    "num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS, "head_dim": _WIDTH,
    "v_head_dim": _VALUE_WIDTH, "swa_num_attention_heads": _HEADS, "swa_num_key_value_heads": _KV_HEADS,
    "swa_head_dim": _WIDTH, "swa_v_head_dim": _VALUE_WIDTH, "attention_value_scale": 0.707,
    "sliding_window": WINDOW, "sliding_window_size": WINDOW, "hybrid_layer_pattern": [0, 1, 1],
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["dense"] * _LAYERS, "moe_layer_freq": [0] * _LAYERS, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "layernorm_epsilon": 1e-6, "rms_norm_eps": 1e-6,
    "attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False, "partial_rotary_factor": 1.0,
    "rope_theta": 10000.0, "swa_rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def make_model(folder: Path) -> None:
    """Its files. The last token decides most of what follows: many drafts are accepted, not all."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    weights = {
        "model.embed_tokens.weight": torch.randn(_VOCABULARY, _HIDDEN),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": torch.randn(_VOCABULARY, _HIDDEN) * 0.05,
    }
    for layer in range(_LAYERS):
        weights |= _layer(f"model.layers.{layer}.", "post_attention_layernorm")
    for number in range(_MODELS):
        own = f"model.mtp.layers.{number}."
        weights |= _layer(own, "pre_mlp_layernorm", 0.02)
        weights |= {
            f"{own}{norm}.weight": torch.ones(_HIDDEN) for norm in ("enorm", "hnorm", "final_layernorm")
        }
        # Of the token's embedding and the target's hidden state.
        joined = torch.cat((torch.eye(_HIDDEN), torch.zeros(_HIDDEN, _HIDDEN)), 1)
        weights[f"{own}eh_proj.weight"] = joined + torch.randn(_HIDDEN, 2 * _HIDDEN) * 0.01
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_CONFIG), "utf-8")


def _layer(prefix: str, norm: str, scale: float = 0.05) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (_HEADS * _WIDTH, _HIDDEN), "self_attn.k_proj": (_KV_HEADS * _WIDTH, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * _VALUE_WIDTH, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _VALUE_WIDTH), "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN), "mlp.down_proj": (_HIDDEN, _INNER),
    }  # fmt: skip
    made = {f"{prefix}{part}.weight": torch.randn(shape) * scale for part, shape in shapes.items()}
    return made | {f"{prefix}{own}.weight": torch.ones(_HIDDEN) for own in ("input_layernorm", norm)}
