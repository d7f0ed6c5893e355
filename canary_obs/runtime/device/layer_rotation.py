"""Rotates over layers: checks that a forward wrote one of them."""

from __future__ import annotations

import torch
from torch import Tensor

from canary_kernels.buffers import GroupBuffers
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import FingerprintPlan
from canary_kernels.layer_write import WITNESSES, allocate_witness, check_layer, note_layer


class LayerRotation:
    """Checks in each forward that one layer, another each time, was written."""

    def __init__(self, plans: tuple[FingerprintPlan, ...], device: torch.device) -> None:
        self._plans, self._next = plans, 0
        self._witness = allocate_witness(device if plans else torch.device("cpu"))
        self._noted: FingerprintPlan | None = None

    @property
    def num_layers(self) -> int:
        """Forwards until every layer was checked; 0 = no bytes are covered."""
        return len(self._plans)

    def share_of(self, slots: int) -> int:
        """How many of a forward's new slots are looked at."""
        return min(slots, WITNESSES) if self._plans else 0

    def note(self, backend: Backend, buffers: GroupBuffers, slots: Tensor) -> None:
        """Before a forward writes these slots: note the bytes of the layer that is next."""
        if self._plans:
            self._noted = self._plans[self._next]
            self._next = (self._next + 1) % len(self._plans)
            note_layer(backend, buffers, self._noted, self._witness, slots)

    def check(self, backend: Backend, buffers: GroupBuffers, slots: Tensor) -> None:
        """After the forward, and the fingerprinting: compare."""
        noted, self._noted = self._noted, None
        if noted is not None:
            check_layer(backend, buffers, noted, self._witness, slots)
