"""Entry points of write: records of the tokens that this forward adds, and of slots that are reset."""

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
from canary_kernels.write import reference

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers, RowBatch
    from canary_kernels.layout import RecordState


@functools.cache
def _kernel() -> ModuleType:
    """Triton is imported on first use."""
    return importlib.import_module("canary_kernels.write.kernel")


@functools.cache
def _cpu() -> ModuleType:
    """numba is imported, and all compiled, on first use."""
    return importlib.import_module("canary_kernels.write.cpu")


@functools.cache
def _reset() -> ModuleType:
    """As above."""
    return importlib.import_module("canary_kernels.write.reset")


def write_identities(backend: Backend, buffers: GroupBuffers, batch: RowBatch) -> None:
    """Write PENDING records (token, position, chain) of the new tokens; run it before the HEAD verify.

    Logs WRITE_POSITION and, with expected_ids, WRITE_TOKEN. A request whose lengths lie outside the table or
    the forward is logged (slot -1, its prefix as the actual value) and not written. A record that replaces a
    COMPLETE one of another token keeps the old fingerprints, by which `complete_slots` sees a lost write. The
    same token may rightly leave equal bytes: with ALiBi or without rotation K and V do not depend on the
    position. Without digests, tokens that continue a slot that this forward writes become ADOPTED.
    """
    if launched_again(batch.cache, write_identities, buffers):
        return
    check_buffers(backend, buffers)
    check_batch(buffers, batch)
    if backend is Backend.NUMBA:
        _cpu().write_identities(buffers, batch)
        return
    if backend is Backend.TORCH:
        reference.write_identities(buffers, batch)
        return
    launch = _kernel().write_identities(buffers, batch)
    if launch is not None:
        keep_launch(batch.cache, write_identities, launch, buffers)


def reset_slots(backend: Backend, buffers: GroupBuffers, slots: Tensor, state: RecordState) -> None:
    """Nothing is known of these slots (int32|int64 [n], contiguous; out of range = skip) but their state."""
    check_buffers(backend, buffers)
    check_slots(buffers, slots=slots)
    if backend is Backend.TRITON:
        _reset().reset_slots(buffers, slots, state)
    else:
        reference.reset_slots(buffers, slots, state)
