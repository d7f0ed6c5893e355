"""Sizes of the decoder and of its attention variants, with the names of their weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Sizes of a latent row, in elements. A head's own size is the model's head_dim."""

    rank: int  # what keys and values are made of
    rope: int  # the rotary part of the key, shared by all heads

    @property
    def row(self) -> int:
        """Elements of one row."""
        return self.rank + self.rope

    def tensors(self, prefix: str, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """Name (DeepSeek's names) and shape of a layer's attention weights, but for o_proj."""
        return {
            prefix + "q_proj.weight": (shape.heads * (shape.head_dim + self.rope), shape.hidden),
            prefix + "kv_a_proj_with_mqa.weight": (self.row, shape.hidden),
            prefix + "kv_a_layernorm.weight": (self.rank,),
            prefix + "kv_b_proj.weight": (shape.heads * 2 * shape.head_dim, self.rank),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseShape:
    """Sizes of the indexer, in elements."""

    heads: int = 2
    size: int = 16  # of an index key
    top_k: int = 16  # tokens that attention reads

    def tensors(self, prefix: str, hidden: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of a layer's weights."""
        return {
            prefix + "q_proj.weight": (self.heads * self.size, hidden),
            prefix + "k_proj.weight": (self.size, hidden),
            prefix + "w_proj.weight": (self.heads, hidden),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedShape:
    """Sizes in elements; DeepSeek-V4's where a cache row is made of them."""

    ratios: tuple[int, ...]  # by layer; tokens per entry
    indexed: int  # the ratio whose layers choose entries by an indexer
    rank: int = 448  # of an entry, without its rotary part
    rope: int = 64  # of an entry, and of an index key, which is all rotary
    heads: int = 2
    index_heads: int = 2
    top_k: int = 8  # entries that the indexer chooses for a token

    @property
    def entry(self) -> int:
        """Elements of an entry."""
        return self.rank + self.rope

    def state(self, ratio: int) -> int:
        """Elements kept of a token whose run is not complete: entry, index key, gate."""
        return self.entry + (self.rope if ratio == self.indexed else 0) + 1

    def tensors(self, prefix: str, hidden: int, ratio: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of a layer's weights."""
        shapes = {
            "q_proj": (self.heads * self.entry, hidden),
            "state_proj": (self.state(ratio), hidden),
            "place_bias": (ratio, 1),
            "o_proj": (hidden, self.heads * self.rank),
        }
        if ratio == self.indexed:
            shapes |= {
                "index_q_proj": (self.index_heads * self.rope, hidden),
                "index_w_proj": (self.index_heads, hidden),
            }
        return {f"{prefix}{name}.weight": size for name, size in shapes.items()}


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
