"""What a sweep walks: the slots that a command asks for, and which are still held when their turn comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from canary_obs.config import CanaryConfig
from canary_obs.engine_api.views import CachedSlots
from canary_obs.errors import ConfigurationError
from canary_obs.records import StartSweep
from canary_obs.runtime.device.state import DeviceState

if TYPE_CHECKING:
    from canary_obs.engine_api.adapter import PrefixCache


class SweepWalk:
    """Raises ConfigurationError at attach for a setting that the engine's prefix cache cannot follow."""

    def __init__(self, state: DeviceState, cache: PrefixCache, config: CanaryConfig) -> None:
        self._state, self._cache = state, cache
        no_slots = torch.empty(0, dtype=torch.int64)
        self._knows_windows = cache.swa_resident("full", no_slots) is not None
        if config.swa_resident_only and not self._knows_windows:
            raise ConfigurationError(
                "swa_resident_only",
                True,
                "this engine does not show what a sliding-window group holds",
                "Leave it out.",
            )

    def refusal(self, command: StartSweep) -> str | None:
        """Why this sweep cannot be done; None = it can."""
        known = self._state.by_name
        if unknown := [name for name in command.groups if name not in known]:
            return f"unknown groups {unknown}; there are: {', '.join(known)}"
        if command.swa_resident_only and not self._knows_windows:
            return (
                "swa_resident_only: this engine does not show what a sliding-window group holds; leave it out"
            )
        return None

    def slots(self, group: str, command: StartSweep) -> CachedSlots:
        """Every slot of the group to be walked."""
        cached = self._cache.cached(group, unlocked_only=command.unlocked_only)
        if not command.swa_resident_only:
            return cached
        resident = self._cache.swa_resident(group, cached.slots)
        assert resident is not None
        return CachedSlots(
            slots=cached.slots[resident],
            positions=cached.positions[resident],
            previous=cached.previous[resident],
        )

    def held(self, group: str, slots: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Both (int64 [n]), with -1 for what is not held any more."""
        held = self._cache.still_cached(group, slots)
        # A window may have left the slot before, and another token taken it, while this one is still held.
        before_held = (previous >= 0) & self._cache.still_cached(group, previous.clamp(min=0))
        return torch.where(held, slots, -1), torch.where(before_held, previous, -1)
