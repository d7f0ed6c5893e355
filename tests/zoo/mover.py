"""An engine that moves pages of running requests, as defragmentation and copy-on-write do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from canary_obs.engines.reference.request import Request
from canary_obs.engines.reference.scheduler import Plan
from tests.zoo.stage import Stage

GROUP, EVERY, PAGES = "full", 4, 8


class Mover:
    """Every few steps a running request's own pages go to other slots; the canary is told."""

    def __init__(self, stage: Stage, carry: Callable[[Mover, Tensor, Tensor], None]) -> None:
        self.stage, self.carry = stage, carry
        stage.around(stage.scheduler, "schedule", self._schedule)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """The bytes of slots (int64 [n] each), layer by layer."""
        for store in self.stage.pool.stores:
            for tensor in store.tensors():
                tensor[target] = tensor[source]

    def store(self, source: Tensor) -> list[list[Tensor]]:
        """Copies of the bytes of slots (int64 [n]), by layer."""
        return [[tensor[source].clone() for tensor in store.tensors()] for store in self.stage.pool.stores]

    def load(self, held: list[list[Tensor]], target: Tensor) -> None:
        """Stored bytes into slots (int64 [n]), layer by layer."""
        for store, layer in zip(self.stage.pool.stores, held, strict=True):
            for tensor, rows in zip(store.tensors(), layer, strict=True):
                tensor[target] = rows

    def _schedule(self, original: Callable[[], Plan]) -> Plan:
        plan = original()
        if self.stage.forward % EVERY == 0:
            for request in self.stage.veterans(own=PAGES * self.stage.page):
                if request in plan.requests and self._move(request):
                    break
        return plan

    def _move(self, request: Request) -> bool:
        allocator = self.stage.scheduler.allocator
        if allocator.free_pages < PAGES:
            return False
        place = slice(request.shared, request.shared + PAGES * self.stage.page)
        source, target = request.slots[place].copy(), allocator.allocate(PAGES)
        self.carry(self, torch.from_numpy(source), torch.from_numpy(target))
        request.slots[place] = target
        self.stage.pool.req_to_token[request.row, place] = torch.from_numpy(target.astype(np.int32))
        allocator.free(source)
        return True


def copying(stage: Stage) -> None:
    """Pages are copied within the pool."""

    def carry(mover: Mover, source: Tensor, target: Tensor) -> None:
        mover.copy(source, target)
        stage.canary.copied(GROUP, source, target)

    stage.mover = Mover(stage, carry)
