"""Settings of the engine, the two presets, and the kinds of models they come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import torch

from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.model.shapes import CompressedShape, LatentShape, ModelShape, SparseShape
from canary_obs.reference_engine.tokenizer import VOCAB_SIZE

DEMO_SHAPE = ModelShape(
    vocab_size=VOCAB_SIZE, hidden=384, layers=6, heads=12, kv_heads=2, head_dim=32, intermediate=1024
)
TINY_SHAPE = ModelShape(
    vocab_size=VOCAB_SIZE, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=64
)


class KVFormat(StrEnum):
    """What keys and values are stored as."""

    PLAIN = "plain"  # the model's own type
    FP8 = "fp8"  # with a float32 scale for each token and head
    INT8 = "int8"  # likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from. A checkpoint replaces shape and seed."""

    shape: ModelShape
    num_slots: int  # KV pool, in tokens
    swa_slots: int = 0  # pool of the sliding-window layers, in tokens; 0 = there are none
    page_size: int = 1
    max_running: int = 16  # requests in one batch
    max_context: int = 512  # prompt and output of one request, in tokens
    token_budget: int = 96  # tokens of one forward
    seed: int = 0
    checkpoint: Path | None = None
    dtype: torch.dtype = torch.float32
    kv_format: KVFormat = KVFormat.PLAIN
    device: str = "cpu"
    host_pages: int = 0  # pages of evicted prefixes kept in host memory; 0 = none
    draft_layers: int = 0  # the target's first layers as a draft model; 0 = no speculation
    draft_tokens: int = 3  # proposed per request and step
    cuda_graphs: bool = True  # on CUDA: decode steps replay a captured graph

    def check(self) -> None:
        """Raises ConfigurationError for sizes that cannot serve."""
        for name in ("num_slots", "page_size", "max_running", "max_context", "token_budget"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    name, getattr(self, name), "must be at least 1", "Use a positive number."
                )
        if self.num_slots % self.page_size:
            raise ConfigurationError(
                "num_slots",
                self.num_slots,
                f"not whole pages of {self.page_size}",
                "Use a multiple of page_size.",
            )
        if self.num_slots < self.max_context + self.page_size:
            raise ConfigurationError(
                "num_slots",
                self.num_slots,
                f"one request of max_context={self.max_context} would not fit",
                "Enlarge num_slots or shorten max_context.",
            )
        self._check_windows()
        self._check_drafts()
        if self.token_budget < self.max_running:
            raise ConfigurationError(
                "token_budget",
                self.token_budget,
                f"every one of max_running={self.max_running} requests needs one token per step",
                "Enlarge token_budget or lower max_running.",
            )
        if self.shape.latent is not None and self.checkpoint is not None:
            raise ConfigurationError(
                "checkpoint",
                str(self.checkpoint),
                "checkpoints hold grouped-query attention, the model has latent attention",
                "Leave the checkpoint out, or use --model llama.",
            )
        if self.shape.latent is not None and self.kv_format is not KVFormat.PLAIN:
            raise ConfigurationError(
                "kv_format",
                self.kv_format.value,
                "latent rows are stored in the model's own type",
                "Use kv_format plain.",
            )

        self._check_compressed()
        self._check_sparse()

    def _check_sparse(self) -> None:
        if self.shape.sparse is None:
            return
        if self.shape.latent is None:
            rule = "the indexer chooses latent rows, the model has none"
        elif self.host_pages:
            rule = "the host tier (host_pages) keeps no index keys"
        elif self.draft_layers:
            rule = "a draft model (draft_layers) has no index keys"
        else:
            return
        raise ConfigurationError(
            "sparse", self.shape.sparse, rule, "Use a latent shape, host_pages 0 and draft_layers 0."
        )

    def _check_compressed(self) -> None:
        sizes = self.shape.compressed
        if sizes is None:
            return
        if self.checkpoint is not None:
            rule = "a checkpoint's layers are not compressed"
        elif len(sizes.ratios) != self.shape.layers or any(self.page_size % ratio for ratio in sizes.ratios):
            rule = f"not one ratio per layer that divides page_size={self.page_size}"
        elif sizes.rank % 64 or not 0 < sizes.rank <= 512:
            rule = f"rank={sizes.rank} is not 64 to 512 in steps of 64: each 64 elements share a scale"
        elif self.host_pages:
            rule = "the host tier (host_pages) keeps no compressed entries"
        else:
            return
        raise ConfigurationError("compressed", sizes, rule, "Change ratios, page_size or host_pages.")

    def _check_drafts(self) -> None:
        if not self.draft_layers:
            return
        if not 1 <= self.draft_layers < self.shape.layers or self.draft_tokens < 1:
            raise ConfigurationError(
                "draft_layers",
                f"{self.draft_layers} with draft_tokens={self.draft_tokens}",
                f"a draft has some of the {self.shape.layers} layers, not all, and proposes something",
                "Use 0 for no speculation.",
            )
        if self.shape.windows or self.shape.compressed is not None or self.host_pages:
            raise ConfigurationError(
                "draft_layers",
                self.draft_layers,
                "draft KV has no window slots, no compressed entries and no place in the host tier",
                "Use a model without windows and compression, and host_pages 0.",
            )

    def _check_windows(self) -> None:
        windows, shape = {window for window in self.shape.windows if window is not None}, self.shape
        window = shape.window or 0
        if not windows:
            rule = "no layer of the shape has a sliding window" if self.swa_slots else ""
        elif self.checkpoint is not None:
            rule = "a checkpoint's layers see everything"
        elif len(shape.windows) != shape.layers or len(windows) > 1 or None not in shape.windows:
            rule = (
                "not one entry per layer, one window for all that have one, and a layer that sees everything"
            )
        elif window < 2:
            rule = "a window is at least 2 tokens"
        elif self.swa_slots < window + self.token_budget:
            rule = f"one request needs window + token_budget = {window + self.token_budget} of swa_slots"
        elif self.host_pages:
            rule = "the host tier (host_pages) keeps no window slots"
        else:
            rule = ""
        if rule:
            value = f"{shape.windows} with swa_slots={self.swa_slots}"
            raise ConfigurationError("windows", value, rule, "Change the shape's windows, or swa_slots.")


def demo(**changes: object) -> EngineConfig:
    """Steps of about 25 ms on one CPU core; a pool small enough to evict and preempt all the time."""
    return _preset({"shape": DEMO_SHAPE, "num_slots": 3072, "token_budget": 64}, changes)


def tiny(**changes: object) -> EngineConfig:
    """Steps of 1 to 2 ms, for tests and soak."""
    sizes = {"num_slots": 256, "max_running": 8, "max_context": 128, "token_budget": 32}
    return _preset({"shape": TINY_SHAPE, **sizes}, changes)


def _preset(base: dict[str, object], changes: dict[str, object]) -> EngineConfig:
    return EngineConfig(**(base | changes))  # type: ignore[arg-type]


def latent_shape(shape: ModelShape) -> ModelShape:
    """The same model with latent attention."""
    return replace(shape, kv_heads=1, latent=LatentShape(rank=32, rope=8))


def sparse_latent(config: EngineConfig) -> EngineConfig:
    """Latent attention over what an indexer chooses; pages hold index keys, then the scales of these."""
    shape = replace(latent_shape(config.shape), sparse=SparseShape(top_k=max(2, config.max_context // 8)))
    return replace(config, shape=shape, page_size=8)


def with_windows(config: EngineConfig) -> EngineConfig:
    """Every third layer sees everything, the others an eighth of the context; half of the slots for them."""
    layers = config.shape.layers
    window = max(2, config.max_context // 8)
    windows = tuple(None if layer % 3 == (layers - 1) % 3 else window for layer in range(layers))
    shape = replace(config.shape, windows=windows)
    return replace(config, shape=shape, swa_slots=config.num_slots // 2)


def compressed(config: EngineConfig) -> EngineConfig:
    """Layers in turn compress runs of 4 tokens, which an indexer chooses, and of 128; half have a window."""
    layers = config.shape.layers
    sizes = CompressedShape(ratios=tuple(128 if layer % 2 else 4 for layer in range(layers)), indexed=4)
    context, window = max(384, config.max_context), 32
    windows = tuple(None if layer % 2 else window for layer in range(layers))
    shape = replace(config.shape, compressed=sizes, windows=windows)
    pages = max(config.num_slots // 128, 3 * config.max_running // 2 + 4)
    return replace(
        config, shape=shape, page_size=128, max_context=context, num_slots=128 * pages, swa_slots=64 * pages
    )


# What `--model` offers: each changes a preset.
MODELS: dict[str, Callable[[EngineConfig], EngineConfig]] = {
    "llama": lambda config: config,
    "fp8": lambda config: replace(config, kv_format=KVFormat.FP8),
    "int8": lambda config: replace(config, kv_format=KVFormat.INT8),
    "mla": lambda config: replace(config, shape=latent_shape(config.shape)),
    "mla_sparse": sparse_latent,
    "host_tier": lambda config: replace(config, page_size=4, host_pages=config.num_slots // 4),
    "speculative": lambda config: replace(config, draft_layers=max(1, config.shape.layers // 2)),
    "swa": with_windows,
    "compressed": compressed,
}


def with_model(config: EngineConfig, model: str) -> EngineConfig:
    """The preset as another kind of model. Raises ConfigurationError for an unknown one."""
    if model not in MODELS:
        raise ConfigurationError("--model", model, "no such model", f"Use one of: {', '.join(MODELS)}.")
    return MODELS[model](config)
