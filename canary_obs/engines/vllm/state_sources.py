"""Where vLLM keeps the bytes of states (Mamba, linear attention, short convolutions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from canary_kernels.buffers import KVSource
from canary_kernels.layout import Part
from canary_obs.errors import UnsupportedEngine

_PARTS = (Part.K, Part.V)  # of a layer's first and second tensor: as a rule convolution and recurrence


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


def state_sources(layers: Sequence[tuple[int, Sequence[Tensor]]], rank: int) -> tuple[KVSource, ...]:
    """One source per tensor of a layer. layers: the layer's number, and its tensors [blocks, ...].

    `rank`: of tensor parallelism. Raises UnsupportedEngine for tensors whose bytes cannot be described.
    """
    found = []
    for number, tensors in layers:
        if len(tensors) > len(_PARTS):
            raise UnsupportedEngine(
                f"layer {number} keeps {len(tensors)} tensors of states; at most 2 are supported"
            )
        for part, tensor in zip(_PARTS, tensors, strict=False):
            size = tensor[0].numel() * tensor.element_size()
            if not tensor[0].is_contiguous() or size % 4:
                raise UnsupportedEngine(
                    f"layer {number} keeps {size} bytes per state with strides {tensor.stride()}; the rule "
                    "is one run of bytes, a multiple of 4"
                )
            stride = tensor.stride(0) * tensor.element_size()
            found.append(
                KVSource(
                    tensor=tensor,
                    part=part,
                    layer=number,
                    head_start=rank,
                    num_heads=1,
                    head_bytes=size,
                    page_size=1,
                    page_stride=stride,
                    slot_stride=stride,
                    head_stride=size,
                    element_bytes=size,
                    element_stride=size,
                )
            )
    return tuple(found)
