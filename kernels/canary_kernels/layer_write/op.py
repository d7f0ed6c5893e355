"""Entry points of layer_write: note one layer's bytes before a forward, compare them after it."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

import torch

from canary_kernels.checks import Backend, check_buffers, check_slots, keep_launch, launched_again
from canary_kernels.layer_write import reference

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers
    from canary_kernels.fingerprint.plan import FingerprintPlan

WITNESSES = 4096  # slots of a forward that are looked at; a layer that is never written shows in any


@functools.cache
def _kernel() -> ModuleType:
    """Triton is imported on first use."""
    return importlib.import_module("canary_kernels.layer_write.kernel")


def allocate_witness(device: torch.device) -> Tensor:
    """int64 [WITNESSES, 4]: slot, its IDENTITY, hashes of K and V before the forward."""
    return torch.full((WITNESSES, 4), -1, dtype=torch.int64, device=device)


def note_layer(
    backend: Backend, buffers: GroupBuffers, layer: FingerprintPlan, witness: Tensor, slots: Tensor
) -> None:
    """Note identities and bytes of the first slots (integers [n]; out of range = skip) before their forward.

    layer: one of `layer_plans`.
    """
    kept = note_layer, id(layer)  # of each layer, as a forward has the other ones in between
    if launched_again(buffers.cache, kept, layer, witness, slots):
        return
    check_buffers(backend, buffers)
    check_slots(buffers, slots=slots)
    room = _kernel() if backend is Backend.TRITON else reference
    launch = room.note_layer(buffers, layer, witness, slots[:WITNESSES])
    if launch is not None:
        keep_launch(buffers.cache, kept, launch, layer, witness, slots)


def check_layer(
    backend: Backend, buffers: GroupBuffers, layer: FingerprintPlan, witness: Tensor, slots: Tensor
) -> None:
    """Log LOST_WRITE for each part whose bytes are those noted, where they cannot rightly be.

    That is where the slot held another token (COMPLETE record), or where the bytes are all zero: a pool that
    was never written. Run after `complete_slots`, with the same slots as the note.
    """
    kept = check_layer, id(layer)  # of each layer, as a forward has the other ones in between
    if launched_again(buffers.cache, kept, layer, witness, slots):
        return
    check_buffers(backend, buffers)
    check_slots(buffers, slots=slots)
    room = _kernel() if backend is Backend.TRITON else reference
    launch = room.check_layer(buffers, layer, witness, slots[:WITNESSES])
    if launch is not None:
        keep_launch(buffers.cache, kept, launch, layer, witness, slots)
