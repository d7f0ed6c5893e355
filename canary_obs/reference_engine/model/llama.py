"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query or latent attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from canary_obs.reference_engine.model.attention import Attend, Attention
from canary_obs.reference_engine.model.compression import Compress, CompressedAttention
from canary_obs.reference_engine.model.latent import LatentAttention
from canary_obs.reference_engine.model.rotary import Rotary, Rotation, rotate
from canary_obs.reference_engine.model.shapes import ModelShape
from canary_obs.reference_engine.model.sparse import Indexer


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer; the projections that share an input are fused."""

    input_norm: Tensor  # [hidden]
    attention: Attention
    compressed: CompressedAttention | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


class GroupedQueryAttention:
    """Query heads in groups, each group with one key and one value head."""

    def __init__(self, shape: ModelShape, weights: dict[str, Tensor]) -> None:
        self._shape = shape
        self._qkv = torch.cat([weights[f"{part}_proj"] for part in "qkv"])
        self._output = weights["o_proj"]

    def __call__(self, layer: int, normed: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[tokens, hidden] of the normed input [tokens, hidden]."""
        shape = self._shape
        rotated = shape.heads + shape.kv_heads
        qkv = functional.linear(normed, self._qkv).view(-1, rotated + shape.kv_heads, shape.head_dim)
        rotary_part = rotate(qkv[:, :rotated], rotation)
        mixed = attend(layer, rotary_part[:, : shape.heads], rotary_part[:, shape.heads :], qkv[:, rotated:])
        return functional.linear(mixed, self._output)


class Llama:
    """The decoder. Holds no cache: attention and its storage come from the caller."""

    def __init__(
        self,
        shape: ModelShape,
        weights: dict[str, Tensor],
        max_context: int,
        device: torch.device,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        to_device = {name: weight.to(device) for name, weight in weights.items()}
        self.shape = shape
        self._all_reduce = all_reduce or (lambda partial: partial)  # over the ranks that hold the other heads
        self.embedding = to_device["model.embed_tokens.weight"]
        self.final_norm = to_device["model.norm.weight"]
        self.head = self.embedding if shape.tied_embeddings else to_device["lm_head.weight"]
        rotary_part = shape.latent.rope if shape.latent else shape.head_dim
        self._rotary = Rotary(rotary_part, shape.rope_theta, max_context, self.embedding)
        self.entry_rotary: Rotary | None = None  # of compressed entries
        if shape.compressed:
            self.entry_rotary = Rotary(shape.compressed.rope, shape.rope_theta, max_context, self.embedding)
        self.blocks = [self._block(to_device, layer) for layer in range(shape.layers)]

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights, activations and KV."""
        return self.embedding.dtype

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, compress: Compress | None = None
    ) -> Tensor:
        """Hidden states [tokens, hidden] after the final norm. Compressed layers need `compress`."""
        shape = self.shape
        rotation = self._rotary.at(positions)
        hidden = functional.embedding(input_ids, self.embedding)
        for layer, block in enumerate(self.blocks):
            normed = functional.rms_norm(hidden, (shape.hidden,), block.input_norm, shape.norm_eps)
            hidden = hidden + self._all_reduce(block.attention(layer, normed, rotation, attend))
            if block.compressed is not None:
                assert compress is not None
                hidden = hidden + block.compressed(layer, normed, positions, compress)
            normed = functional.rms_norm(hidden, (shape.hidden,), block.mlp_norm, shape.norm_eps)
            gate, up = functional.linear(normed, block.gate_up).chunk(2, dim=-1)
            hidden = hidden + self._all_reduce(functional.linear(functional.silu(gate) * up, block.down))
        return functional.rms_norm(hidden, (shape.hidden,), self.final_norm, shape.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab_size] of hidden states [n, hidden]."""
        return functional.linear(hidden, self.head).float()

    def _block(self, weights: dict[str, Tensor], layer: int) -> Block:
        shape, prefix = self.shape, f"model.layers.{layer}."
        own = {
            name.removeprefix(prefix).removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.startswith(prefix)
        }

        def part(name: str) -> dict[str, Tensor]:
            return {key.removeprefix(name): weight for key, weight in own.items() if key.startswith(name)}

        latent, compressed = shape.latent, None
        projections = part("self_attn.")
        if shape.compressed and self.entry_rotary:
            compressed = CompressedAttention(shape, part("compressor."), self.entry_rotary)
        indexer = Indexer(shape.sparse, part("indexer.")) if shape.sparse else None
        return Block(
            input_norm=own["input_layernorm"],
            attention=LatentAttention(shape, latent, projections, indexer)
            if latent
            else GroupedQueryAttention(shape, projections),
            compressed=compressed,
            mlp_norm=own["post_attention_layernorm"],
            gate_up=torch.cat([own["mlp.gate_proj"], own["mlp.up_proj"]]),
            down=own["mlp.down_proj"],
        )


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
