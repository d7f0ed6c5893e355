"""The group of sliding-window layers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.engine_api.views import CachedCount, CachedSlots, GroupStep, GroupView, WindowTokens
from canary_obs.engines.reference.full_group import FULL
from canary_obs.reference_engine.cache.connector import WINDOW_SLOTS
from canary_obs.reference_engine.cache.pool import WindowPool
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.request import Request
from canary_obs.reference_engine.scheduling.windows import SlidingWindows

SWA = "swa"


class SwaGroup:
    """Layers that keep the KV of the last tokens only, under slot numbers of their own."""

    numbering = WINDOW_SLOTS

    def __init__(self, engine: Engine, pool: WindowPool, windows: SlidingWindows) -> None:
        self._scheduler, self._pool, self._windows, self._slots = (
            engine.scheduler,
            pool,
            windows,
            windows.slots,
        )
        sources = [source for layer, store in pool.stores.items() for source in store.sources(layer)]
        self.view = GroupView(
            name=SWA, num_slots=pool.num_slots, page_size=1, sources=tuple(sources), window=pool.window
        )
        self._mark = self._slots_mark = -1

    def step(self, batch: ForwardBatch) -> GroupStep:
        """The engine's own translated slot table: -1 where a token was evicted."""
        assert batch.window_slots is not None
        return GroupStep(slot_table=self._pool.table, out_slots=batch.window_slots)

    def cached(self, *, unlocked_only: bool) -> CachedSlots:
        """Resident slots only; starts the period that `still_cached` refers to."""
        cache, slots = self._scheduler.cache, self._slots
        self._mark, self._slots_mark = cache.clock, slots.clock
        full = cache.held()
        full = full[slots.resident(full)]
        if unlocked_only:
            full = full[slots.locks[full] == 0]
        before = cache.previous[full]
        return CachedSlots(
            slots=torch.from_numpy(slots.of[full]),
            positions=torch.from_numpy(cache.position[full]),
            previous=torch.from_numpy(np.where(before >= 0, slots.of[before], -1)),
        )

    def count(self) -> CachedCount:
        """Resident slots of the radix tree's nodes; all window slots that were taken back."""
        nodes = self._scheduler.cache.oldest_first()
        held = sum(int(self._slots.resident(node.slots).sum()) for node in nodes)
        return CachedCount(slots=held, removed=self._slots.dropped)

    def still_cached(self, slots: Tensor) -> Tensor:
        """bool [n]: for the same cached token since the last `cached` call."""
        owner = self._slots.owner[slots.numpy()]
        tenure = self._scheduler.cache.inserted_at[owner] <= self._mark
        return torch.from_numpy((owner >= 0) & tenure & (self._slots.given_at[owner] <= self._slots_mark))

    def in_use(self) -> Tensor:
        """int64 [n] on the CPU: slots of running requests and of the prefix cache."""
        own = self._slots.of[self._scheduler.live_slots()]
        return torch.from_numpy(own[own >= 0])

    def joined(self, request: Request) -> NDArray[np.int64]:
        """int64 [n]: window slots of what an admitted request sees of its prefix."""
        own: NDArray[np.int64] = self._slots.of[request.slots[request.window_start : request.shared]]
        return own

    def num_joined(self) -> int:
        """The engine's own total."""
        return self._windows.joined

    def resident(self, full: Tensor) -> Tensor:
        """bool [n]: slots of the full group (int64 [n], CPU) that have a slot in this group."""
        return torch.from_numpy(self._slots.resident(full.numpy()))

    def tokens(self) -> WindowTokens:
        """Live tokens of the full group, by what this group holds for them."""
        full = self._scheduler.live_slots()
        own = self._slots.of[full]
        resident = own >= 0
        return WindowTokens(
            full=(FULL,),
            windowed=(SWA,),
            out_of_window=int((~resident).sum()),
            diverging=int((own[resident] != full[resident]).sum()),
        )

    def holders(self, slot: int) -> tuple[str, ...]:
        """Running requests with the slot in their window."""
        owner = int(self._slots.owner[slot])
        return tuple(
            request.id
            for request in self._scheduler.running
            if owner >= 0 and owner in request.slots[request.window_start : request.computed]
        )
