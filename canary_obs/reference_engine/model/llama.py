"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query or latent attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from canary_obs.reference_engine.model.compression import Compress, CompressedAttention, CompressedShape
from canary_obs.reference_engine.model.latent import LatentAttention, LatentShape
from canary_obs.reference_engine.model.rotary import Rotary, Turn, rotate
from canary_obs.reference_engine.model.sparse import Indexer, Pick, SparseShape


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
    latent: LatentShape | None = None  # None = grouped-query attention
    sparse: SparseShape | None = None  # latent attention reads only what an indexer chooses
    compressed: CompressedShape | None = None  # layers read compressed entries, too
    windows: tuple[int | None, ...] = ()  # by layer: tokens that attention sees; None or () = all

    @property
    def key_size(self) -> int:
        """Elements of one key head in the cache."""
        return self.latent.row if self.latent else self.head_dim

    @property
    def window(self) -> int | None:
        """The sliding window of those layers that have one: the same for all; None = no such layer."""
        return next((window for window in self.windows if window is not None), None)

    def sees_all(self, layer: int) -> bool:
        """Whether a layer attends to the whole context."""
        return not self.windows or self.windows[layer] is None

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
            shapes |= {prefix + "input_layernorm.weight": (self.hidden,)}
            if self.compressed:
                ratio = self.compressed.ratios[layer]
                shapes |= self.compressed.tensors(prefix + "compressor.", self.hidden, ratio)
            if self.sparse:
                shapes |= self.sparse.tensors(prefix + "indexer.", self.hidden)
            if self.latent:
                shapes |= self.latent.tensors(prefix + "self_attn.", self)
            else:
                shapes |= {
                    prefix + "self_attn.q_proj.weight": (query, self.hidden),
                    prefix + "self_attn.k_proj.weight": (kv, self.hidden),
                    prefix + "self_attn.v_proj.weight": (kv, self.hidden),
                }
            shapes |= {
                prefix + "self_attn.o_proj.weight": (self.hidden, query),
                prefix + "post_attention_layernorm.weight": (self.hidden,),
                prefix + "mlp.gate_proj.weight": (self.intermediate, self.hidden),
                prefix + "mlp.up_proj.weight": (self.intermediate, self.hidden),
                prefix + "mlp.down_proj.weight": (self.hidden, self.intermediate),
            }
        return shapes


class Attend(Protocol):
    """Stores the new keys and values of a layer and attends over everything the tokens may see."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, pick: Pick | None = None
    ) -> Tensor:
        """query [tokens, heads, dim], key [tokens, kv_heads, dim], value [tokens, kv_heads, value dim].

        Returns [tokens, heads * value dim]. `pick`: attend to no more than this chooses.
        """


class Attention(Protocol):
    """A layer's attention with its projections."""

    def __call__(self, layer: int, normed: Tensor, turn: Turn, attend: Attend) -> Tensor:
        """[tokens, hidden] of the normed input [tokens, hidden]."""


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

    def __call__(self, layer: int, normed: Tensor, turn: Turn, attend: Attend) -> Tensor:
        """[tokens, hidden] of the normed input [tokens, hidden]."""
        shape = self._shape
        rotated = shape.heads + shape.kv_heads
        qkv = functional.linear(normed, self._qkv).view(-1, rotated + shape.kv_heads, shape.head_dim)
        turned = rotate(qkv[:, :rotated], turn)
        mixed = attend(layer, turned[:, : shape.heads], turned[:, shape.heads :], qkv[:, rotated:])
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
        turned = shape.latent.rope if shape.latent else shape.head_dim
        self._rotary = Rotary(turned, shape.rope_theta, max_context, self.embedding)
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
        turn = self._rotary.at(positions)
        hidden = functional.embedding(input_ids, self.embedding)
        for layer, block in enumerate(self.blocks):
            normed = functional.rms_norm(hidden, (shape.hidden,), block.input_norm, shape.norm_eps)
            hidden = hidden + self._all_reduce(block.attention(layer, normed, turn, attend))
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
