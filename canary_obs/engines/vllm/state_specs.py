"""What vLLM's specs say of states (Mamba, linear attention, short convolutions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from canary_obs.errors import UnsupportedEngine


def keeps_states(specs: Sequence[Any]) -> bool:
    """Whether the specs of a group's layers are those of states."""
    return bool(specs) and all(type(spec).__name__ == "MambaSpec" for spec in specs)


def tokens_per_state(specs: Sequence[Any]) -> int | None:
    """Tokens after which a request's state moves on to its next block; None = it stays in its first.

    Raises UnsupportedEngine where it is not known which states a forward writes.
    """
    (spec, *others) = specs
    if any(other.block_size != spec.block_size for other in others):
        raise UnsupportedEngine(
            f"it holds states with blocks of {spec.block_size} and other numbers of tokens"
        )
    if count := getattr(spec, "num_speculative_blocks", 0):
        raise UnsupportedEngine(
            f"it holds states with num_speculative_blocks={count}: which of them a request goes on with is "
            "known on the device only"
        )
    mode = spec.mamba_cache_mode
    if mode not in ("none", "align"):
        raise UnsupportedEngine(
            f"it holds states with mamba_cache_mode={mode!r}; supported are 'none', 'align'"
        )
    return int(spec.block_size) if mode == "align" else None
