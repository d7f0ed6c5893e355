"""An engine that moves pages of running requests, as defragmentation and copy-on-write do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from canary_obs.reference_engine.scheduling.request import Request
from canary_obs.reference_engine.scheduling.scheduler import Plan
from tests.fault_cases.stage import Stage

EVERY, SLOTS = 4, 8


class Mover:
    """Every few steps a running request's own pages go to other slots; the canary is told."""

    def __init__(self, stage: Stage, carry: Callable[[Mover, Tensor, Tensor], None]) -> None:
        self.stage, self.carry = stage, carry
        self.pages = max(1, SLOTS // stage.page)
        stage.around(stage.scheduler, "schedule", self._schedule)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """The bytes of slots (int64 [n] each), layer by layer."""
        for store in self.stage.pool.stores:
            for tensor in store.tensors():
                tensor[target] = tensor[source]
        if self.stage.pool.index is not None:
            self.copy_index(source, target)

    def copy_index(self, source: Tensor, target: Tensor) -> None:
        """The index keys of slots (int64 [n] each) and their scales: a page holds several."""
        index, page = self.stage.pool.index, self.stage.page
        for held in (index.keys, index.scales):
            held[:, target // page, target % page] = held[:, source // page, source % page]

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
            for request in self.stage.veterans(own=self.pages * self.stage.page):
                if request in plan.requests and self._move(request):
                    break
        return plan

    def _move(self, request: Request) -> bool:
        allocator = self.stage.scheduler.allocator
        if allocator.free_pages < self.pages:
            return False
        place = slice(request.shared, request.shared + self.pages * self.stage.page)
        source, target = request.slots[place].copy(), allocator.allocate(self.pages)
        self.carry(self, torch.from_numpy(source), torch.from_numpy(target))
        request.slots[place] = target
        self.stage.pool.req_to_token[request.row, place] = torch.from_numpy(target.astype(np.int32))
        allocator.free(source)
        return True


def copying(stage: Stage) -> None:
    """Pages are copied within the pool."""

    def carry(mover: Mover, source: Tensor, target: Tensor) -> None:
        mover.copy(source, target)
        for group in stage.canary.state.by_name:
            stage.canary.copied(group, source, target)

    stage.mover = Mover(stage, carry)
