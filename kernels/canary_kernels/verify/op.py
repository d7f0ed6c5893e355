"""Entry points of verify: are the records of these slots those of this prefix?"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from canary_kernels.checks import (
    Backend,
    check_batch,
    check_buffers,
    check_slots,
    keep_launch,
    launched_again,
)
from canary_kernels.verify import reference

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers, RowBatch
    from canary_kernels.layout import Phase


@functools.cache
def _kernel() -> ModuleType:
    """Triton is imported on first use."""
    return importlib.import_module("canary_kernels.verify.kernel")


@functools.cache
def _cpu() -> ModuleType:
    """numba is imported, and all compiled, on first use."""
    return importlib.import_module("canary_kernels.verify.cpu")


def verify_rows(backend: Backend, buffers: GroupBuffers, batch: RowBatch, phase: Phase) -> None:
    """Check the records of every request's prefix (HEAD), or of prefix and new tokens (TAIL).

    Walks the slot table itself. Requests whose row is outside the table are padding. Counts verified and
    unverified slots; logs UNWRITTEN, POSITION, CHAIN and, with digests, TOKEN: at HEAD, and at TAIL where a
    request adds nothing, as this forward may have written its prefix. At TAIL, with known_lens, WRITE_TOKEN:
    the chain after as many tokens as the scheduler knows is compared with its digest.
    """
    if launched_again(batch.cache, phase, buffers):
        return
    check_buffers(backend, buffers)
    check_batch(buffers, batch)
    if backend is Backend.NUMBA:
        _cpu().verify_rows(buffers, batch, phase)
        return
    if backend is Backend.TORCH:
        reference.verify_rows(buffers, batch, phase)
        return
    launch = _kernel().verify_rows(buffers, batch, phase)
    if launch is not None:
        keep_launch(batch.cache, phase, launch, buffers)


def verify_list(
    backend: Backend, buffers: GroupBuffers, slots: Tensor, positions: Tensor, previous: Tensor, phase: Phase
) -> None:
    """Check the records of listed slots (int32 or int64 [n] each; slot < 0 = skip, previous < 0 = none).

    Position 0 is checked against the anchor; without a previous slot, any other by its position only.
    """
    check_buffers(backend, buffers)
    check_slots(buffers, slots=slots, positions=positions, previous=previous)
    if backend is Backend.NUMBA:
        _cpu().verify_list(buffers, slots, positions, previous, phase)
        return
    if backend is Backend.TORCH:
        reference.verify_list(buffers, slots, positions, previous, phase)
        return
    _kernel().verify_list(buffers, slots, positions, previous, phase)
