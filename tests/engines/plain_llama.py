"""An independent Llama: whole sequence, no cache, float64, written from the formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from canary_obs.engines.reference.model import ModelShape


def plain_logits(shape: ModelShape, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """float64 [len(tokens), vocab_size] by full causal attention."""
    double = {name: weight.double() for name, weight in weights.items()}
    hidden = double["model.embed_tokens.weight"][tokens]
    half = shape.head_dim // 2
    frequency = shape.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), torch.arange(len(tokens))[:, None] * frequency)
    for layer in range(shape.layers):

        def linear(name: str, value: Tensor, layer: int = layer) -> Tensor:
            return value @ double[f"model.layers.{layer}.{name}.weight"].T

        normed = _norm(hidden, double[f"model.layers.{layer}.input_layernorm.weight"], shape.norm_eps)
        query, key, value = (
            linear(f"self_attn.{part}_proj", normed).view(len(tokens), -1, shape.head_dim) for part in "qkv"
        )
        query, key = _turned(query, turn), _turned(key, turn)
        heads = []
        for head in range(shape.heads):
            shared = head * shape.kv_heads // shape.heads
            scores = query[:, head] @ key[:, shared].T / shape.head_dim**0.5
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value[:, shared])
        hidden = hidden + linear("self_attn.o_proj", torch.cat(heads, dim=-1))
        normed = _norm(
            hidden, double[f"model.layers.{layer}.post_attention_layernorm.weight"], shape.norm_eps
        )
        gate = linear("mlp.gate_proj", normed)
        hidden = hidden + linear("mlp.down_proj", gate * torch.sigmoid(gate) * linear("mlp.up_proj", normed))
    hidden = _norm(hidden, double["model.norm.weight"], shape.norm_eps)
    head_name = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
    return hidden @ double[head_name].T


def _norm(value: Tensor, weight: Tensor, eps: float) -> Tensor:
    return value / (value.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turned(vectors: Tensor, turn: Tensor) -> Tensor:
    half = vectors.shape[-1] // 2
    pairs = torch.complex(vectors[..., :half], vectors[..., half:]) * turn[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=-1)
