"""Tiny models with random weights, one per attention kind and kind of draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 1024
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def make_model(root: Path, name: str) -> Path:
    """A model directory, built on first use."""
    folder = root / name
    if not folder.exists():
        torch.manual_seed(0)
        if name in WITHOUT_WEIGHTS:
            WITHOUT_WEIGHTS[name]().save_pretrained(folder)
        else:
            model = _BUILDERS[name]().to(torch.float32)
            if name in _HEADS:
                _save_head(model, folder)
            else:
                model.save_pretrained(folder)
        _tokenizer(folder)
    return folder


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, tie_word_embeddings=False, **_COMMON))


def _llama_one_head() -> Any:
    """Two ranks hold the same head of K and V: then they may spread the tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    own = _COMMON | {"num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, tie_word_embeddings=False, **own))


def _llama_draft() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, tie_word_embeddings=False, **_COMMON))


def _llama_near() -> Any:
    """Proposes what `llama` would say often, but not always."""
    model = _llama()
    with torch.no_grad():
        for weights in model.parameters():
            weights += torch.randn_like(weights) * weights.std() * 0.1
    return model


def _save_head(model: Any, folder: Path) -> None:
    """One layer as EAGLE's checkpoints hold it; without training it passes the target's hidden state on."""
    from safetensors.torch import save_file

    config, size = model.config, model.config.hidden_size
    config.architectures = ["EagleLlamaForCausalLM"]
    config.save_pretrained(folder)
    dropped = ("lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight")
    named = {name.removeprefix("model."): weights for name, weights in model.state_dict().items()}
    kept = {name: weights.contiguous() for name, weights in named.items() if name not in dropped}
    kept["fc.weight"] = torch.cat((torch.zeros(size, size), torch.eye(size)), dim=1)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _llama_eagle3() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=1, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=VOCABULARY, **_COMMON
    )


def _glm_mtp() -> Any:
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        num_hidden_layers=2, num_nextn_predict_layers=1, first_k_dense_replace=1, n_routed_experts=4,
        n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=64,
        architectures=["Glm4MoeForCausalLM"], **_COMMON,
    )  # fmt: skip


def _falcon_h1() -> Any:
    """A hybrid of attention and state-space layers."""
    from transformers import FalconH1Config

    return FalconH1Config(
        num_hidden_layers=2, mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1,
        mamba_d_state=16, mamba_d_conv=4, mamba_expand=1, mamba_chunk_size=64,
        architectures=["FalconH1ForCausalLM"], **_COMMON,
    )  # fmt: skip


def _gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    types = (["sliding_attention"] * 2 + ["full_attention"]) * 2
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            num_hidden_layers=6,
            sliding_window=64,
            layer_types=types,
            query_pre_attn_scalar=32,
            **_COMMON,
        )
    )


def _mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(num_hidden_layers=3, sliding_window=64, **_COMMON))


def _deepseek() -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    small = {key: value for key, value in _COMMON.items() if key not in ("head_dim", "num_key_value_heads")}
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            num_hidden_layers=2, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None,
            qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=2,
            n_routed_experts=4, n_shared_experts=1, moe_intermediate_size=64, **small,
        )
    )  # fmt: skip


def _bloom() -> Any:
    """Position-independent keys and values (ALiBi)."""
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(
        BloomConfig(
            vocab_size=VOCABULARY, hidden_size=128, n_layer=3, n_head=4, seq_length=4096,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip


_BUILDERS = {
    "llama": _llama,
    "llama_one_head": _llama_one_head,
    "llama_draft": _llama_draft,
    "llama_eagle": _llama_draft,
    "llama_near": _llama_near,
    "gemma3": _gemma3,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "bloom": _bloom,
}
# For `load_format="dummy"`: vLLM makes the weights, the same ones each time.
WITHOUT_WEIGHTS = {"llama_eagle3": _llama_eagle3, "glm_mtp": _glm_mtp, "falcon_h1": _falcon_h1}
_HEADS = frozenset({"llama_eagle"})


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(4, VOCABULARY))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
