"""An independent Llama: whole sequence, no cache, float64, written from the formulas."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from canary_obs.reference_engine.model.shapes import ModelShape
from tests.reference_engine.plain_compression import compressed_part
from tests.reference_engine.plain_sparse import chosen_positions


def plain_logits(shape: ModelShape, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """float64 [len(tokens), vocab_size] by full causal attention, within a layer's window."""
    double = {name: weight.double() for name, weight in weights.items()}
    hidden = double["model.embed_tokens.weight"][tokens]
    half = (shape.latent.rope if shape.latent else shape.head_dim) // 2
    frequency = shape.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), torch.arange(len(tokens))[:, None] * frequency)
    for layer in range(shape.layers):

        def linear(name: str, value: Tensor, layer: int = layer) -> Tensor:
            return value @ double[f"model.layers.{layer}.{name}.weight"].T

        normed = _norm(hidden, double[f"model.layers.{layer}.input_layernorm.weight"], shape.norm_eps)
        if shape.latent:
            norm = double[f"model.layers.{layer}.self_attn.kv_a_layernorm.weight"]
            query, key, value = _latent_heads(shape, linear, normed, norm, turn)
        else:
            query, key, value = (
                linear(f"self_attn.{part}_proj", normed).view(len(tokens), -1, shape.head_dim)
                for part in "qkv"
            )
            query, key = _turned(query, turn), _turned(key, turn)
        sparse = _chosen(shape, layer, double, normed) if shape.sparse else None
        heads = []
        for head in range(shape.heads):
            shared = head * key.shape[1] // shape.heads
            scores = query[:, head] @ key[:, shared].T / key.shape[2] ** 0.5
            hidden_from = torch.ones_like(scores, dtype=torch.bool).triu(1)
            if shape.windows and (window := shape.windows[layer]) is not None:
                hidden_from |= torch.ones_like(hidden_from).tril(-window)
            if sparse is not None:
                hidden_from |= ~sparse
            heads.append(scores.masked_fill(hidden_from, -torch.inf).softmax(-1) @ value[:, shared])
        hidden = hidden + linear("self_attn.o_proj", torch.cat(heads, dim=-1))
        if shape.compressed:
            hidden = hidden + compressed_part(shape.compressed, layer, double, normed)
        normed = _norm(
            hidden, double[f"model.layers.{layer}.post_attention_layernorm.weight"], shape.norm_eps
        )
        gate = linear("mlp.gate_proj", normed)
        hidden = hidden + linear("mlp.down_proj", gate * torch.sigmoid(gate) * linear("mlp.up_proj", normed))
    hidden = _norm(hidden, double["model.norm.weight"], shape.norm_eps)
    head_name = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
    return hidden @ double[head_name].T


def _latent_heads(
    shape: ModelShape, linear: Callable[[str, Tensor], Tensor], normed: Tensor, norm: Tensor, turn: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of every head written out, as the latent is defined."""
    assert shape.latent is not None
    count, dim, rank = len(normed), shape.head_dim, shape.latent.rank
    query = linear("self_attn.q_proj", normed).view(count, shape.heads, -1)
    row = linear("self_attn.kv_a_proj_with_mqa", normed)
    up = linear("self_attn.kv_b_proj", _norm(row[:, :rank], norm, shape.norm_eps))
    up = up.view(count, shape.heads, 2, dim)
    rope = _turned(row[:, None, rank:], turn).expand(-1, shape.heads, -1)
    query = torch.cat([query[..., :dim], _turned(query[..., dim:], turn)], dim=-1)
    return query, torch.cat([up[:, :, 0], rope], dim=-1), up[:, :, 1]


def _chosen(shape: ModelShape, layer: int, weights: dict[str, Tensor], normed: Tensor) -> Tensor:
    assert shape.sparse is not None
    assert shape.latent is not None
    seen = torch.zeros(len(normed), len(normed), dtype=torch.bool)
    positions = chosen_positions(shape.sparse, layer, weights, normed, shape.latent.rope)
    for position, chosen in enumerate(positions):
        seen[position, chosen] = True
    return seen


def _norm(value: Tensor, weight: Tensor, eps: float) -> Tensor:
    return value / (value.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turned(vectors: Tensor, turn: Tensor) -> Tensor:
    half = vectors.shape[-1] // 2
    pairs = torch.complex(vectors[..., :half], vectors[..., half:]) * turn[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=-1)
