"""Safetensors checkpoints in Hugging Face's Llama form: config.json and *.safetensors in one directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.model.shapes import ModelShape
from canary_obs.reference_engine.tokenizer import VOCAB_SIZE

SETTING = "checkpoint"
# Settings of config.json that change the mathematics, with the only value this decoder computes.
FIXED: dict[str, tuple[object, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}


def load_checkpoint(folder: Path, dtype: torch.dtype) -> tuple[ModelShape, dict[str, Tensor]]:
    """Shape and weights, converted to dtype. Raises ConfigurationError naming path, rule and remedy."""
    if not folder.is_dir():
        raise _refusal(folder, "no such directory", "Name a directory with config.json and *.safetensors.")
    shape = _read_shape(folder / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _refusal(folder, "holds no *.safetensors file", "Convert the weights to safetensors first.")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise _refusal(file, f"cannot be read: {error}", "Download or write the file again.") from None
    weights = {}
    for name, size in shape.tensors().items():
        if name not in found:
            raise _refusal(folder, f"tensor {name} is missing", "Use a complete Llama checkpoint.")
        if tuple(found[name].shape) != size:
            rule = f"tensor {name} has shape {tuple(found[name].shape)}, config.json asks for {size}"
            raise _refusal(folder, rule, "Use the config.json that belongs to these weights.")
        weights[name] = found[name].to(dtype)
    return shape, weights


def save_checkpoint(folder: Path, shape: ModelShape, weights: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors; the directory is created."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")


def _read_shape(path: Path) -> ModelShape:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _refusal(
            path, f"cannot be read: {error}", "Put the model's config.json next to the weights."
        ) from None
    if not isinstance(content, dict):
        raise _refusal(path, "not a JSON object", "Put the model's config.json next to the weights.")
    rope = content.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise _refusal(
            path, f"rope_type is {rope['rope_type']!r}", "Use a checkpoint with plain rotary positions."
        )
    for name, allowed in FIXED.items():
        if name in content and content[name] not in allowed:
            rule = f"{name} is {content[name]!r}, supported is {allowed[0]!r}"
            raise _refusal(path, rule, "Use a plain Llama checkpoint.")
    heads = _whole(path, content, "num_attention_heads")
    hidden = _whole(path, content, "hidden_size")
    shape = ModelShape(
        vocab_size=_whole(path, content, "vocab_size"),
        hidden=hidden,
        layers=_whole(path, content, "num_hidden_layers"),
        heads=heads,
        kv_heads=_whole(path, content, "num_key_value_heads", heads),
        head_dim=_whole(path, content, "head_dim", hidden // heads),
        intermediate=_whole(path, content, "intermediate_size"),
        rope_theta=_positive(path, content | rope, "rope_theta", 10_000.0),
        norm_eps=_positive(path, content, "rms_norm_eps", 1e-6),
        tied_embeddings=bool(content.get("tie_word_embeddings", False)),
    )
    if shape.vocab_size < VOCAB_SIZE:
        rule = f"vocab_size is {shape.vocab_size}, the byte tokenizer needs {VOCAB_SIZE}"
        raise _refusal(path, rule, "Use a model with a larger vocabulary.")
    if shape.heads % shape.kv_heads or shape.head_dim % 2:
        rule = (
            f"{shape.heads} heads, {shape.kv_heads} kv heads, head_dim {shape.head_dim} do not divide evenly"
        )
        raise _refusal(path, rule, "heads must be a multiple of kv heads, head_dim even.")
    return shape


def _whole(path: Path, content: dict[str, Any], name: str, default: int | None = None) -> int:
    value = content.get(name, default)
    if value is None and default is not None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refusal(path, f"{name} is {value!r}, not a positive whole number", "Correct config.json.")
    return value


def _positive(path: Path, content: dict[str, Any], name: str, default: float) -> float:
    value = content.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise _refusal(path, f"{name} is {value!r}, not a positive number", "Correct config.json.")
    return float(value)


def _refusal(path: Path, rule: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(SETTING, str(path), rule, remedy)
