"""Compares the bytes that a forward will overwrite while the forward before it still runs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from canary_kernels import layout
from canary_kernels.buffers import allocate_shares
from canary_kernels.fingerprint import compare_slots
from canary_obs.runtime.device.state import DeviceState
from canary_obs.runtime.shown_groups import Shown


class EarlyComparison:
    """Has a clock of its own: the checks of the forward under way still read the rank's."""

    def __init__(self, state: DeviceState) -> None:
        self._state, device = state, state.clock.device
        self._clock = torch.zeros_like(state.clock)
        self._buffers = tuple(
            replace(group.buffers, clock=self._clock, shares=allocate_shares(device))
            for group in state.groups
        )

    def launch(self, shown: Shown, slots: Tensor) -> None:
        """Compare slots (int64 [n], the same in each group) as of the host's clock."""
        self._clock.fill_(self._state.now)
        for group, _ in shown.groups:
            given = group.backend, self._buffers[group.index], group.plan, slots, layout.Phase.HEAD
            compare_slots(*given, of_forward=True)
