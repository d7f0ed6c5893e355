"""What memory can give: kernels that do nothing but read, for ceilings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

# (words per block, warps, programs per multiprocessor): which is fastest differs by a few per cent.
READERS = ((2048, 4, 8), (4096, 4, 8), (8192, 8, 8), (1024, 4, 16))


@triton.jit
def _read_kernel(memory, sink, num_words, BLOCK: tl.constexpr):
    """Programs read blocks in turn; the store never happens but keeps the reads."""
    total = tl.zeros([BLOCK], tl.int32)
    for first in range(tl.program_id(0) * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        total ^= tl.load(memory + first.to(tl.int64) + tl.arange(0, BLOCK))
    if tl.max(total) == 0x7FFFFFF1:
        tl.store(sink, 1)


def read_all(memory: Tensor, sink: Tensor, reader: tuple[int, int, int], multiprocessors: int) -> None:
    """Read int32 memory once; its length is a multiple of every block. sink: int32 [1]."""
    block, warps, programs = reader
    _read_kernel[(multiprocessors * programs,)](memory, sink, memory.numel(), BLOCK=block, num_warps=warps)
