"""The bytes of states (Mamba, linear attention, short convolutions): one slot each, of several tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from canary_kernels.buffers import KVSource
from canary_kernels.layout import Part
from canary_obs.errors import UnsupportedEngine

_PARTS = (Part.K, Part.V)  # of a layer's first and second tensor: as a rule convolution and recurrence


def state_sources(layers: Sequence[tuple[int, Sequence[Tensor]]], rank: int) -> tuple[KVSource, ...]:
    """One source per tensor of a layer. layers: the layer's number, and its tensors [slots, ...].

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
