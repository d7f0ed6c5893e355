"""Records in memory of their own, laid out like KV, which an engine sends along with the KV of its pages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from canary_kernels.layout import RECORD_WORDS

_WIDTH = RECORD_WORDS // 2


class Buffer(NamedTuple):
    """Memory as engines register it for transfers."""

    address: int
    bytes: int
    page_bytes: int


class SplicedRecords:
    """One group's records, as two buffers of equal width: engines send K and V in pairs.

    Zeros = no record. The sender fills them before it sends; the receiver takes what arrived, once.
    """

    def __init__(self, num_slots: int, page_size: int, device: torch.device) -> None:
        self._parts = [torch.zeros((num_slots, _WIDTH), dtype=torch.int64, device=device) for _ in range(2)]
        self._page_size = page_size

    @property
    def buffers(self) -> tuple[Buffer, Buffer]:
        """What is to be registered, in this order, by sender and receiver alike."""
        first, second = (
            Buffer(part.data_ptr(), part.nbytes, part[0].nbytes * self._page_size) for part in self._parts
        )
        return first, second

    @property
    def num_slots(self) -> int:
        """Of both parts."""
        return int(self._parts[0].shape[0])

    def fill(self, slots: Tensor, records: Tensor | None) -> None:
        """Set what is sent with these slots, int64 [n]; records int64 [n, RECORD_WORDS], None = nothing."""
        for number, part in enumerate(self._parts):
            part[slots] = 0 if records is None else records[:, number * _WIDTH : (number + 1) * _WIDTH]

    def take(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Records that came for these slots, int64 [n, RECORD_WORDS], and which slots had one, bool [n]."""
        records = torch.cat([part[slots] for part in self._parts], 1)
        self.fill(slots, None)
        return records, records.any(1)
