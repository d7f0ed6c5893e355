"""KV memory on the CPU as strided views: all layers of a regular pool are one gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from canary_kernels.hashing import layer_key_int, word_keys
from canary_kernels.layout import Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from canary_kernels.buffers import KVSource
    from canary_kernels.fingerprint.geometry import Geometry
    from canary_kernels.hashing import Words

    Stack = NDArray[np.int32] | NDArray[np.uint8]

_WORD_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleView:
    """The sources of one geometry as gatherable views."""

    stacks: tuple[Stack, ...]  # each [sources, pages, (tiles, slots,) heads, bands, elements, run]
    num_sources: int
    page_size: int
    tile_size: int
    num_bytes: int  # covered, per source and slot
    source_keys: Words  # [num_sources, 2]; the layer key in its part's column, K and V
    word_keys: Words  # [num_words]


def view_bundle(geometry: Geometry, sources: Sequence[KVSource]) -> BundleView:
    """Views of sources that share a geometry; evenly spaced ones of one storage share a view."""
    spaced = sorted(sources, key=lambda source: source.tensor.data_ptr())
    stacks: list[list[KVSource]] = []
    for source in spaced:
        if stacks and _extends(stacks[-1], source):
            stacks[-1].append(source)
        else:
            stacks.append([source])
    keys = np.zeros((len(spaced), 2), dtype=np.uint64)
    for index, source in enumerate(spaced):
        keys[index, source.part - Part.K] = layer_key_int(source.layer)
    return BundleView(
        stacks=tuple(_stack(geometry, stack) for stack in stacks),
        num_sources=len(spaced),
        page_size=geometry.page_size,
        tile_size=geometry.tile_size,
        num_bytes=geometry.num_bytes,
        source_keys=keys,
        word_keys=word_keys(geometry.first_word, geometry.num_words).numpy().view(np.uint64),
    )


def _extends(stack: list[KVSource], source: KVSource) -> bool:
    if stack[-1].tensor.untyped_storage().data_ptr() != source.tensor.untyped_storage().data_ptr():
        return False
    step = source.tensor.data_ptr() - stack[-1].tensor.data_ptr()
    return len(stack) == 1 or step == stack[1].tensor.data_ptr() - stack[0].tensor.data_ptr()


def _stack(geometry: Geometry, sources: list[KVSource]) -> Stack:
    first = sources[0].tensor
    storage = first.untyped_storage()
    offset = first.data_ptr() - storage.data_ptr()
    step = sources[1].tensor.data_ptr() - first.data_ptr() if len(sources) > 1 else 0
    # A partial cover needs only the first heads, elements, bytes.
    covered = geometry.num_bytes
    heads = -(-covered // geometry.head_bytes)
    bands = -(-min(covered, geometry.head_bytes) // geometry.band_bytes)
    elements = -(-min(covered, geometry.band_bytes) // geometry.element_bytes)
    run = min(covered, geometry.element_bytes)
    tiles = geometry.page_size // geometry.tile_size
    strides = [
        step,
        geometry.page_stride,
        geometry.tile_stride,
        geometry.slot_stride,
        geometry.head_stride,
        geometry.band_stride,
        geometry.element_stride,
    ]
    unit = _WORD_BYTES if all(n % _WORD_BYTES == 0 for n in (*strides, offset, run)) else 1
    inner = [tiles, geometry.tile_size, heads, bands, elements]
    page_extent = run + sum((size - 1) * stride for size, stride in zip(inner, strides[2:], strict=True))
    room = storage.nbytes() - offset - step * (len(sources) - 1)
    pages = (room - page_extent) // geometry.page_stride + 1
    sizes = [len(sources), pages, *inner, run // unit]
    strides = [stride // unit for stride in strides] + [1]
    if geometry.page_size == 1:
        del sizes[2:4], strides[2:4]
    base = torch.empty(0, dtype=torch.int32 if unit == _WORD_BYTES else torch.uint8)
    return base.set_(storage, offset // unit, sizes, strides).numpy()
