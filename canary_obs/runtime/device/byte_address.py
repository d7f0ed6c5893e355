"""Locates single bytes of a slot's KV in the engine's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from canary_kernels.buffers import KVSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteAddress:
    """One byte of one slot."""

    storage: Tensor  # uint8 view of the whole storage
    offset: int

    def read(self) -> int:
        """Value of the byte, 0 to 255; waits for the device."""
        return int(self.storage[self.offset])

    def flip(self, mask: int) -> None:
        """Invert the bits of `mask` in place."""
        with torch.inference_mode():  # the engine may have made its tensors there: none but it may write then
            self.storage[self.offset : self.offset + 1].bitwise_xor_(mask)


def locate_byte(source: KVSource, slot: int, byte: int) -> ByteAddress:
    """Byte `byte` of a slot that the source holds, counted head-major from 0 to slot_bytes - 1."""
    if not source.sharding.holds(slot):
        raise IndexError(
            f"slot {slot} lies on another rank than {source.sharding.rank}; read its bytes there"
        )
    if not 0 <= byte < source.slot_bytes:
        raise IndexError(f"byte {byte} of a slot of {source.slot_bytes} bytes; count from 0, head-major")
    head, inner = divmod(byte, source.head_bytes)
    band, inner = divmod(inner, source.band_bytes or source.head_bytes)
    page, in_page = divmod(source.sharding.local(slot), source.page_size)
    tile, in_tile = divmod(in_page, source.tile_size or source.page_size)
    tensor = source.tensor
    offset = (
        int(tensor.storage_offset()) * tensor.element_size()
        + page * source.page_stride
        + tile * source.tile_stride
        + in_tile * source.slot_stride
        + head * source.head_stride
        + band * source.band_stride
        + inner // source.element_bytes * source.element_stride
        + inner % source.element_bytes
    )
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return ByteAddress(storage=storage, offset=offset)


def read_slot(source: KVSource, slot: int) -> Tensor:
    """uint8 [slot_bytes] on the CPU: a slot's bytes in one source, head-major; waits for the device."""
    first = locate_byte(source, slot, 0)
    byte = torch.arange(source.slot_bytes)
    head, inner = byte // source.head_bytes, byte % source.head_bytes
    band_bytes = source.band_bytes or source.head_bytes
    band, inner = inner // band_bytes, inner % band_bytes
    offsets = head * source.head_stride + band * source.band_stride + inner % source.element_bytes
    offsets += inner // source.element_bytes * source.element_stride + first.offset
    return first.storage[offsets.to(first.storage.device)].cpu()
