"""How the bytes of one slot lie in a source, and which words of a layer they are."""

from __future__ import annotations

from dataclasses import dataclass

from canary_kernels.buffers import WHOLE, Sharding

_WORD_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Where the bytes of a slot lie from a source's base, and which words of a layer they are. In bytes."""

    page_size: int  # 1 when slots follow one another at page_stride
    page_stride: int
    tile_size: int  # slots; page_size when its slots lie evenly
    tile_stride: int
    slot_stride: int  # 0 when page_size is 1
    head_bytes: int  # all of the slot's bytes when its heads follow one another
    head_stride: int
    band_bytes: int  # head_bytes when its elements lie evenly
    band_stride: int
    element_bytes: int
    element_stride: int
    first_word: int
    num_bytes: int  # covered, from the slot's first byte
    sharding: Sharding = WHOLE

    @property
    def num_words(self) -> int:
        """Words covered; the last may be padded with zeros."""
        return -(-self.num_bytes // _WORD_BYTES)
