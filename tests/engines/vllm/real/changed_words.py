"""Changes words of a real vLLM's KV, and says what a block holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.device.byte_address import locate_byte, read_slot

SIZE = 32  # of a block, in slots


def change_words(canary: CanaryRuntime, block: int, slots: Iterable[int], count: int = 1) -> None:
    """Change `count` words of the keys of each of these slots of a block, all bits of each."""
    source = next(one for one in canary._adapter.groups[0].sources if one.layer == 1)
    with canary._adapter.hooks.lock:  # type: ignore[attr-defined]
        for slot in slots:
            for byte in range(4 * count):
                locate_byte(source, block * SIZE + slot, byte).flip(0xFF)


def held(canary: CanaryRuntime, block: int) -> list[torch.Tensor]:
    """The bytes of all its slots."""
    return [
        read_slot(source, block * SIZE + slot)
        for source in canary._adapter.groups[0].sources
        for slot in range(SIZE)
    ]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Byte by byte."""
    return all(map(torch.equal, first, second))
