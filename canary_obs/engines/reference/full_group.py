"""The group of layers that keep the KV of every token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.engine_api.views import CachedCount, CachedSlots, GroupStep, GroupView
from canary_obs.reference_engine.cache.connector import FULL_SLOTS
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.execution.runner import Runner
from canary_obs.reference_engine.scheduling.request import Request

FULL = "full"


class FullGroup:
    """Layers that keep the KV of every token."""

    numbering = FULL_SLOTS

    def __init__(self, engine: Engine, runner: Runner, name: str = FULL) -> None:
        self._engine = engine
        pool, shape, first = runner.pool, runner.model.shape, engine.kv_heads.start
        sources = [
            replace(source, head_start=source.head_start + first)
            for layer, store in enumerate(pool.stores)
            if shape.sees_all(layer)
            for source in store.sources(layer)
        ]
        self.view = GroupView(name=name, num_slots=pool.num_slots, page_size=1, sources=tuple(sources))
        self._mark = -1

    def step(self, batch: ForwardBatch) -> GroupStep:
        """The engine's own slot table and output slots."""
        return GroupStep(slot_table=self._engine.runner.pool.req_to_token, out_slots=batch.out_slots)

    def cached(self, *, unlocked_only: bool) -> CachedSlots:
        """The radix cache's slots, from its per-slot arrays."""
        cache = self._engine.scheduler.cache
        self._mark = cache.clock
        slots = cache.held(unlocked_only=unlocked_only)
        return CachedSlots(
            slots=torch.from_numpy(slots),
            positions=torch.from_numpy(cache.position[slots]),
            previous=torch.from_numpy(cache.previous[slots]),
        )

    def count(self) -> CachedCount:
        """What the radix tree counts as nodes come and go."""
        cache = self._engine.scheduler.cache
        return CachedCount(slots=cache.size, removed=cache.removed)

    def still_cached(self, slots: Tensor) -> Tensor:
        """bool [n]: cached, without a break, since the last `cached` call."""
        cache = self._engine.scheduler.cache
        return torch.from_numpy(cache.inserted_at[slots.numpy()] <= self._mark)

    def in_use(self) -> Tensor:
        """int64 [n] on the CPU: slots of running requests and of the prefix cache."""
        return torch.from_numpy(self._engine.scheduler.live_slots())

    def joined(self, request: Request) -> NDArray[np.int64]:
        """int64 [n]: slots of the prefix that a request was admitted with."""
        return request.slots[: request.shared]

    def num_joined(self) -> int:
        """The engine's own total."""
        return self._engine.statistics.prefix_hit_tokens

    def holders(self, slot: int) -> tuple[str, ...]:
        """Running requests with the slot among the positions they have computed."""
        running = self._engine.scheduler.running
        return tuple(request.id for request in running if slot in request.slots[: request.computed])
