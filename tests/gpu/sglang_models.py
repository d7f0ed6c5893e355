"""Configurations of models whose KV is not in one plain pool: small ones for CPUs, larger ones for GPUs."""

from __future__ import annotations

from typing import Any

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
# Three layers of linear attention, and a full one.
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
# By kind: for a CPU, and for a GPU.
MODELS = {
    "latent": (TINY_LATENT, LATENT),
    "windows": (TINY_WINDOWS, WINDOWS),
    "states": (TINY_STATES, STATES),
}
