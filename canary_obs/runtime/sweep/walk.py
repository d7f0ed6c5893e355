"""Selects the slots of a sweep, and of each chunk those that are still cached."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch import Tensor

from canary_obs.config import CanaryConfig
from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engine_api.views import CachedSlots
from canary_obs.engine_api.walks import CachedWalk, WholeWalk
from canary_obs.errors import ConfigurationError, UnsupportedEngine
from canary_obs.records import StartSweep
from canary_obs.runtime.device.state import DeviceState
from canary_obs.vocabulary import State

_NO_REQUESTS = "this engine does not show which slots a request uses"
_NO_WINDOWS = "this engine does not show which tokens a sliding-window group holds"


class _Count:
    """The slots that a walk showed, and how many the engine counted when it began."""

    def __init__(self, expected: int, num_slots: int) -> None:
        self.expected, self.shown = expected, 0
        self.complete = False  # the walk that is taken from shows a part of what was counted here
        self._seen = np.zeros(num_slots, dtype=np.bool_)

    def add(self, slots: Tensor) -> None:
        """int64 [n], on the CPU."""
        self.shown += slots.numel()
        self._seen[slots.numpy()] = True

    @property
    def different(self) -> int:
        """Different slots that were shown."""
        return int(np.count_nonzero(self._seen))


class SweepWalk:
    """Raises ConfigurationError at attach for a setting that the engine's prefix cache cannot follow."""

    def __init__(self, state: DeviceState, adapter: EngineAdapter, config: CanaryConfig) -> None:
        cache = adapter.prefix_cache
        self._state, self._cache, self._request_slots = state, cache, adapter.request_slots
        self._config = config
        self._uncounted: set[str] = set()
        self._counts: dict[str, _Count] = {}  # by group, of its last walk
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

    def is_whole(self, command: StartSweep) -> bool:
        """Whether a sweep checks at least what those do that the engine starts by itself."""
        config, every = self._config, set(self._state.by_name)
        automatic = StartSweep(
            id="", unlocked_only=config.unlocked_only, swa_resident_only=config.swa_resident_only
        )
        plain = msgspec.structs.replace(command, id="", groups=(), budget_ms=None)
        return (
            command.data
            and set(command.groups or every) == every
            and (not command.selects or plain == automatic)
        )

    def begin(self, group: str, command: StartSweep) -> CachedWalk:
        """A walk over every slot of the group that the command asks for."""
        self._counts.pop(group, None)
        whole = self._cache.walk(group)  # what cannot be walked has no count to be missed
        count = self._cache.count(group)
        self._uncounted.discard(group)
        if count is None:
            self._uncounted.add(group)
        else:
            self._counts[group] = _Count(count.slots, self._state.by_name[group].view.num_slots)
        if command.selects:
            return WholeWalk(self._part(group, command))
        return whole

    def take(self, group: str, walk: CachedWalk, limit: int) -> CachedSlots:
        """The next slots of a walk; the last ones are none."""
        cached = walk.take(limit)
        if (count := self._counts.get(group)) is not None and not count.complete:
            count.add(cached.slots)
        return cached

    def mismatch(self, group: str) -> str | None:
        """Why a sweep of this group can't pass, when all of its walk was taken; None = it can."""
        count = self._counts.get(group)
        if count is None or count.shown == count.expected == count.different:
            return None
        return (
            f"group {group}: the adapter shows {count.different} different slots in the prefix cache, "
            f"the engine counts {count.expected}; the adapter must show every cached slot once"
        )

    def _part(self, group: str, command: StartSweep) -> CachedSlots:
        # The whole content is shown at once and counted, though a part of it is swept.
        cached = self._cache.cached(group, unlocked_only=False)
        if (count := self._counts.get(group)) is not None:
            count.add(cached.slots)
            count.complete = True
        if command.unlocked_only:
            cached = self._cache.cached(group, unlocked_only=True)
        chosen = self._chosen(group, command, cached.slots)
        if command.swa_resident_only:
            resident = self._cache.swa_resident(group, cached.slots)
            assert resident is not None
            chosen &= resident
        return CachedSlots(
            slots=cached.slots[chosen],
            positions=cached.positions[chosen],
            previous=cached.previous[chosen],
        )

    def _chosen(self, group: str, command: StartSweep, slots: Tensor) -> Tensor:
        """bool [n]: `slots` (int64 [n]) that the command asks for. Raises UnsupportedEngine."""
        chosen = torch.ones(slots.numel(), dtype=torch.bool)
        if command.first_slot is not None:
            chosen &= slots >= command.first_slot
        if command.last_slot is not None:
            chosen &= slots <= command.last_slot
        if command.used_only:
            unused = self._cache.cached(group, unlocked_only=True).slots
            chosen &= ~self._among(group, slots, unused)
        if command.request is not None:
            own = self._request_slots(group, command.request)
            if own is None:
                raise UnsupportedEngine(f"request={command.request!r}: {_NO_REQUESTS}; leave it out")
            if not own.numel():
                raise UnsupportedEngine(
                    f"request={command.request!r}: no running request has this name and slots in {group}"
                )
            chosen &= self._among(group, slots, own)
        return chosen

    def _among(self, group: str, slots: Tensor, wanted: Tensor) -> Tensor:
        # By a table, as sorting millions of slots would hold up a step.
        table = torch.zeros(self._state.by_name[group].view.num_slots, dtype=torch.bool)
        table[wanted] = True
        return table[slots]

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
