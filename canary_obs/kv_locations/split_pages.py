"""Pages that hold the elements of all their slots, and after them the scales of all their slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_kernels.buffers import KVSource, source_from_tensor
from canary_kernels.layout import Part, Plane
from canary_obs.errors import UnsupportedEngine

_PROBED = 3  # pages


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPages:
    """One layer's pages, whose bytes a slot has in two places."""

    name: str  # plural, for messages
    pages: Tensor  # uint8 [pages, bytes], contiguous; a page may end with padding
    page_size: int  # slots
    data_bytes: int  # of a slot's elements
    scale_bytes: int  # of a slot's scales; 0 = it has none
    padding: int = 0  # bytes of the scales that need not be written

    def sources(self, layer: int, write: Callable[[int], None]) -> tuple[KVSource, ...]:
        """Elements, and scales if there are any, reported under this layer number.

        `write` writes something to a slot by the engine's own method, each time the same. Raises
        UnsupportedEngine where that changes other bytes. It is tried on the first pages, which are restored;
        nothing else may use them meanwhile.
        """
        data, scales = self._places(self.pages)
        self._check_by_writing(write)
        elements = source_from_tensor(data, Part.K, layer)
        if not self.scale_bytes:
            return (elements,)
        return elements, source_from_tensor(scales, Part.K, layer, plane=Plane.SCALES)

    def _places(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        count, size, first = pages.shape[0], self.page_size, self.page_size * self.data_bytes
        ends = first + size * self.scale_bytes
        if (held := pages.shape[1]) < ends:
            raise UnsupportedEngine(
                f"{self.name} lie in pages of {held} bytes: {size} slots of {self.data_bytes} and "
                f"{self.scale_bytes} bytes take {ends}"
            )
        data, scales = pages[:, :first], pages[:, first:ends]
        return data.view(count, size, 1, self.data_bytes), scales.view(count, size, 1, self.scale_bytes)

    def _check_by_writing(self, write: Callable[[int], None]) -> None:
        probed, size = self.pages[:_PROBED], self.page_size
        data, scales = self._places(probed)
        own = self.data_bytes + self.scale_bytes
        saved = probed.clone()
        try:
            for slot in sorted({0, 1, size - 1, (probed.shape[0] - 1) * size + size // 2}):
                page, place = divmod(slot, size)
                # A byte that is written as one of the two fills differs from the other.
                written, elsewhere = torch.zeros_like(probed, dtype=torch.bool), False
                for fill in (0x00, 0xFF):
                    probed.fill_(fill)
                    write(slot)
                    written |= probed != fill
                    data[page, place], scales[page, place] = fill, fill
                    elsewhere |= bool((probed != fill).any())
                changed = int(written.sum())
                if elsewhere or not own - self.padding <= changed <= own:
                    raise UnsupportedEngine(
                        f"{self.name} are written elsewhere than expected: {changed} bytes of slot "
                        f"{slot} are not its {own} of elements and scales"
                    )
        finally:
            probed.copy_(saved)
