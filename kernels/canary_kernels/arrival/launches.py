"""The launches of a judgement on Triton, put together before they are due."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from canary_kernels.arrival.kernel import CHUNK_SLOTS, keep_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from canary_kernels.arrival.load import ArrivedLoad
    from canary_kernels.buffers import GroupBuffers
    from canary_kernels.launch import Start


def put_together(
    buffers: GroupBuffers, blocks: Tensor, sent: Tensor, load: ArrivedLoad | None
) -> tuple[Tensor | None, Sequence[Callable[[], None]]]:
    """See `op.put_together`. None before both kernels were launched once, which compiles them."""
    judge: Start | None = buffers.cache.get("arrival_kernel")
    keep: Start | None = buffers.cache.get(keep_kernel)
    if judge is None or (load is not None and keep is None):
        return None, ()
    count, width = sent.shape[:2]
    matched = torch.empty(count, dtype=torch.int64, device=blocks.device)
    launches = [judge.again((count, 1), (blocks.data_ptr(), sent.data_ptr(), matched.data_ptr(), width))]
    if load is not None and keep is not None:
        size = load.slots.shape[1]
        given = load.slots, load.identities, load.now, load.edges, matched
        grid = count, triton.cdiv(size, CHUNK_SLOTS)
        launches.append(keep.again(grid, (*(tensor.data_ptr() for tensor in given), size)))
    return matched, launches
