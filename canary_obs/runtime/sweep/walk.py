"""Selects the slots of a sweep, and of each chunk those that are still cached."""

from __future__ import annotations

import torch
from torch import Tensor

from canary_obs.config import CanaryConfig
from canary_obs.engine_api.adapter import PrefixCache
from canary_obs.engine_api.views import CachedSlots
from canary_obs.errors import ConfigurationError
from canary_obs.records import StartSweep
from canary_obs.runtime.device.state import DeviceState
from canary_obs.vocabulary import State

_NO_WINDOWS = "this engine does not show which tokens a sliding-window group holds"


class SweepWalk:
    """Raises ConfigurationError at attach for a setting that the engine's prefix cache cannot follow."""

    def __init__(self, state: DeviceState, cache: PrefixCache, config: CanaryConfig) -> None:
        self._state, self._cache = state, cache
        self._uncounted: set[str] = set()
        self.mismatch: dict[str, str] = {}  # by group, of its last walk: a sweep of it can't pass
        no_slots = torch.empty(0, dtype=torch.int64)
        self._knows_windows = cache.swa_resident("full", no_slots) is not None
        if config.swa_resident_only and not self._knows_windows:
            raise ConfigurationError(
                "swa_resident_only",
                True,
                _NO_WINDOWS,
                "Leave it out.",
            )

    def refusal(self, command: StartSweep) -> str | None:
        """Why the command cannot be executed; None = it can."""
        known = self._state.by_name
        if unknown := [name for name in command.groups if name not in known]:
            return f"unknown groups {unknown}; there are: {', '.join(known)}"
        if command.swa_resident_only and not self._knows_windows:
            return f"swa_resident_only: {_NO_WINDOWS}; leave it out"
        return None

    def slots(self, group: str, command: StartSweep) -> CachedSlots:
        """Every slot of the group that the command asks for."""
        cached = self._counted(group)
        if command.unlocked_only:
            cached = self._cache.cached(group, unlocked_only=True)
        if not command.swa_resident_only:
            return cached
        resident = self._cache.swa_resident(group, cached.slots)
        assert resident is not None
        return CachedSlots(
            slots=cached.slots[resident],
            positions=cached.positions[resident],
            previous=cached.previous[resident],
        )

    def _counted(self, group: str) -> CachedSlots:
        """The whole content of the cache; `mismatch` says so when the engine counts another number."""
        self.mismatch.pop(group, None)
        cached, count = self._cache.cached(group, unlocked_only=False), self._cache.count(group)
        self._uncounted.discard(group)
        if count is None:
            self._uncounted.add(group)
            return cached
        seen = torch.zeros(self._state.by_name[group].view.num_slots, dtype=torch.bool)
        seen[cached.slots] = True
        if int(seen.sum()) != count.slots or cached.slots.numel() != count.slots:
            self.mismatch[group] = (
                f"group {group}: the adapter shows {int(seen.sum())} different slots in the prefix cache, "
                f"the engine counts {count.slots}; the adapter must show every cached slot once"
            )
        return cached

    def reasons(self) -> list[tuple[State, str]]:
        """Groups whose cached slots nobody but the adapter's walk counted, in the last sweep of each."""
        if not self._uncounted:
            return []
        names = ", ".join(sorted(self._uncounted))
        text = f"this engine does not count its cached slots, so a sweep may leave some out: {names}"
        return [(State.DEGRADED, text)]

    def still_cached(self, group: str, slots: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """`slots` and `previous` (int64 [n] each), with -1 for those that are no longer cached."""
        cached = self._cache.still_cached(group, slots)
        # The previous slot may have left the window and been reused while this one is still cached.
        previous_cached = (previous >= 0) & self._cache.still_cached(group, previous.clamp(min=0))
        return torch.where(cached, slots, -1), torch.where(previous_cached, previous, -1)
