"""Settings of the engine, and the two presets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from canary_obs.engines.reference.model import ModelShape
from canary_obs.engines.reference.tokenizer import VOCAB_SIZE
from canary_obs.errors import ConfigurationError

DEMO_SHAPE = ModelShape(
    vocab_size=VOCAB_SIZE, hidden=384, layers=6, heads=12, kv_heads=2, head_dim=32, intermediate=1024
)
TINY_SHAPE = ModelShape(
    vocab_size=VOCAB_SIZE, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=64
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from. A checkpoint replaces shape and seed."""

    shape: ModelShape
    num_slots: int  # KV pool, in tokens
    page_size: int = 1
    max_running: int = 16  # requests in one batch
    max_context: int = 512  # prompt and output of one request, in tokens
    token_budget: int = 96  # tokens of one forward
    seed: int = 0
    checkpoint: Path | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
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
        if self.token_budget < self.max_running:
            raise ConfigurationError(
                "token_budget",
                self.token_budget,
                f"every one of max_running={self.max_running} requests needs one token per step",
                "Enlarge token_budget or lower max_running.",
            )


def demo(**changes: object) -> EngineConfig:
    """Steps of about 25 ms on one CPU core; a pool small enough to evict and preempt all the time."""
    return _preset({"shape": DEMO_SHAPE, "num_slots": 3072, "token_budget": 64}, changes)


def tiny(**changes: object) -> EngineConfig:
    """Steps of 1 to 2 ms, for tests and soak."""
    sizes = {"num_slots": 256, "max_running": 8, "max_context": 128, "token_budget": 32}
    return _preset({"shape": TINY_SHAPE, **sizes}, changes)


def _preset(base: dict[str, object], changes: dict[str, object]) -> EngineConfig:
    return EngineConfig(**(base | changes))  # type: ignore[arg-type]
