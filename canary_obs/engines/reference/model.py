"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of the decoder, in elements."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name (Hugging Face's Llama names) and shape of every weight."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "input_layernorm.weight": (self.hidden,),
                prefix + "self_attn.q_proj.weight": (query, self.hidden),
                prefix + "self_attn.k_proj.weight": (kv, self.hidden),
                prefix + "self_attn.v_proj.weight": (kv, self.hidden),
                prefix + "self_attn.o_proj.weight": (self.hidden, query),
                prefix + "post_attention_layernorm.weight": (self.hidden,),
                prefix + "mlp.gate_proj.weight": (self.intermediate, self.hidden),
                prefix + "mlp.up_proj.weight": (self.intermediate, self.hidden),
                prefix + "mlp.down_proj.weight": (self.hidden, self.intermediate),
            }
        return shapes


class Attend(Protocol):
    """Stores the new keys and values of a layer and attends over everything the tokens may see."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, kv_heads, dim] -> [tokens, heads * dim]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Weights of one layer, the projections that share an input fused."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    output: Tensor  # [hidden, heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


class Llama:
    """The decoder. Holds no cache: attention and its storage come from the caller."""

    def __init__(
        self, shape: ModelShape, weights: dict[str, Tensor], max_context: int, device: torch.device
    ) -> None:
        placed = {name: weight.to(device) for name, weight in weights.items()}
        self.shape = shape
        self.embedding = placed["model.embed_tokens.weight"]
        self.final_norm = placed["model.norm.weight"]
        self.head = self.embedding if shape.tied_embeddings else placed["lm_head.weight"]
        self.blocks = [_block(placed, layer) for layer in range(shape.layers)]
        self.cosine, self.sine = _rotary(shape, max_context, self.embedding)

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights, activations and KV."""
        return self.embedding.dtype

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [tokens, hidden] after the final norm."""
        shape = self.shape
        rotated = shape.heads + shape.kv_heads
        cosine, sine = self.cosine[positions].unsqueeze(1), self.sine[positions].unsqueeze(1)
        hidden = functional.embedding(input_ids, self.embedding)
        for layer, block in enumerate(self.blocks):
            normed = functional.rms_norm(hidden, (shape.hidden,), block.input_norm, shape.norm_eps)
            qkv = functional.linear(normed, block.qkv).view(-1, rotated + shape.kv_heads, shape.head_dim)
            turned = _rotate(qkv[:, :rotated], cosine, sine)
            mixed = attend(layer, turned[:, : shape.heads], turned[:, shape.heads :], qkv[:, rotated:])
            hidden = hidden + functional.linear(mixed, block.output)
            normed = functional.rms_norm(hidden, (shape.hidden,), block.mlp_norm, shape.norm_eps)
            gate, up = functional.linear(normed, block.gate_up).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, block.down)
        return functional.rms_norm(hidden, (shape.hidden,), self.final_norm, shape.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab_size] of hidden states [n, hidden]."""
        return functional.linear(hidden, self.head).float()


def random_weights(
    shape: ModelShape, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Weights of a seed, scaled so that activations keep unit size and logits spread over a few units.

    The same seed gives other weights on another kind of device.
    """
    generator = torch.Generator(device or "cpu").manual_seed(seed)
    weights = {}
    for name, size in shape.tensors().items():
        if len(size) == 1:
            weights[name] = torch.ones(size, dtype=dtype, device=device)
            continue
        gain = 1.0 if name == "model.embed_tokens.weight" else size[1] ** -0.5
        if name == "lm_head.weight":
            gain *= 3.0
        elif "q_proj" in name or "k_proj" in name:
            # Sharper than 1/sqrt(dim): attention then depends on content, so a wrong KV slot changes outputs.
            gain *= 1.5
        weights[name] = torch.randn(size, generator=generator, device=device).mul_(gain).to(dtype)
    if shape.tied_embeddings:
        weights["model.embed_tokens.weight"] *= shape.hidden**-0.5
    return weights


def _block(weights: dict[str, Tensor], layer: int) -> Block:
    def weight(name: str) -> Tensor:
        return weights[f"model.layers.{layer}.{name}.weight"]

    return Block(
        input_norm=weight("input_layernorm"),
        qkv=torch.cat([weight(f"self_attn.{part}_proj") for part in "qkv"]),
        output=weight("self_attn.o_proj"),
        mlp_norm=weight("post_attention_layernorm"),
        gate_up=torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]),
        down=weight("mlp.down_proj"),
    )


def _rotary(shape: ModelShape, max_context: int, like: Tensor) -> tuple[Tensor, Tensor]:
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.arange(max_context, dtype=torch.float64)[:, None] * shape.rope_theta**-steps
    cosine, sine = angles.cos(), angles.sin()
    # Hugging Face's layout pairs element i with i + dim / 2; the minus of the rotation lives in the sine.
    both = torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1)
    return both[0].to(like), both[1].to(like)


def _rotate(vectors: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = vectors.shape[-1] // 2
    swapped = torch.cat([vectors[..., half:], vectors[..., :half]], dim=-1)
    return torch.addcmul(vectors * cosine, swapped, sine)
