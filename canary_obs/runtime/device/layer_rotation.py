"""Rotates over layers: of which one a forward must show that it was written."""

from __future__ import annotations

import torch

from canary_kernels.fingerprint import FingerprintPlan
from canary_kernels.layer_write import WITNESSES, allocate_witness


class LayerRotation:
    """Names one layer per forward, another each time, and keeps what is noted of it before the forward.

    A group's first layer is left out: a model's first one sees nothing but a token's embedding and position,
    and tokens that were never trained share an embedding, or have a zero one.
    """

    def __init__(self, plans: tuple[FingerprintPlan, ...], device: torch.device) -> None:
        first = min((_layer_of(plan) for plan in plans), default=0)
        self._plans = tuple(plan for plan in plans if _layer_of(plan) > first)
        self._next = 0
        self.witness = allocate_witness(device if self._plans else torch.device("cpu"))
        self._noted: FingerprintPlan | None = None

    @property
    def num_layers(self) -> int:
        """Forwards until every layer was checked; 0 = no bytes are covered."""
        return len(self._plans)

    def share_of(self, slots: int) -> int:
        """How many of a forward's new slots are looked at."""
        return min(slots, WITNESSES) if self._plans else 0

    def next_layer(self) -> FingerprintPlan | None:
        """Before a forward: the layer to note, another each time; None = no bytes are covered."""
        if self._plans:
            self._noted = self._plans[self._next]
            self._next = (self._next + 1) % len(self._plans)
        return self._noted

    def noted_layer(self) -> FingerprintPlan | None:
        """After the forward: the layer that was noted, once; None = none was."""
        noted, self._noted = self._noted, None
        return noted


def _layer_of(plan: FingerprintPlan) -> int:
    (bundle,) = plan.bundles
    return bundle.sources[0].layer
