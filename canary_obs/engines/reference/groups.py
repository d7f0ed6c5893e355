"""The reference engine's KV groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.engine_api.views import CachedCount, CachedSlots, GroupStep, GroupView
from canary_obs.engines.reference.compressed_groups import compressed_groups
from canary_obs.engines.reference.full_group import FullGroup
from canary_obs.engines.reference.swa_group import SwaGroup
from canary_obs.reference_engine.cache.entry_rows import IndexRows
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.request import Request


class ReferenceGroup(Protocol):
    """One group: its bytes, its slots in a forward, and which of its slots are live."""

    @property
    def view(self) -> GroupView:
        """Name, sizes and bytes."""

    @property
    def numbering(self) -> str | None:
        """What its slots are sent under to another engine; None = a prefix that is sent has none of them."""

    def step(self, batch: ForwardBatch) -> GroupStep:
        """The forward's slots in this group."""

    def cached(self, *, unlocked_only: bool) -> CachedSlots:
        """Every slot in the prefix cache; starts the period that `still_cached` refers to."""

    def count(self) -> CachedCount:
        """How many slots `cached` should show, as the engine counts them itself."""

    def still_cached(self, slots: Tensor) -> Tensor:
        """bool [n]: cached, without a break, since the last `cached` call."""

    def in_use(self) -> Tensor:
        """int64 [n] on the CPU: slots of running requests and of the prefix cache."""

    def holders(self, slot: int) -> tuple[str, ...]:
        """Running requests with the slot among the positions they have computed."""

    def joined(self, request: Request) -> NDArray[np.int64]:
        """int64 [n]: slots of an admitted request's cached prefix, as far as its forward reads them."""

    def num_joined(self) -> int:
        """How many slots `joined` should have shown of all requests, as the engine counts them itself."""


class IndexGroup(FullGroup):
    """Index keys of sparse layers and their scales: bytes of their own, under the slot numbers of `full`."""

    def __init__(self, engine: Engine, rows: IndexRows) -> None:
        super().__init__(engine, engine.runner, "indexer")
        layers = range(engine.runner.model.shape.layers)
        sources = tuple(source for layer in layers for source in rows.sources(layer, layer))
        self.view = replace(self.view, sources=sources)


def target_groups(engine: Engine) -> tuple[ReferenceGroup, ...]:
    """Every group that the target model's forwards write."""
    pool, windows = engine.runner.pool, engine.scheduler.windows
    sliding = () if pool.window is None or windows is None else (SwaGroup(engine, pool.window, windows),)
    index = () if pool.index is None else (IndexGroup(engine, pool.index),)
    return FullGroup(engine, engine.runner), *sliding, *index, *compressed_groups(engine)


def by_numbering(groups: Mapping[str, ReferenceGroup]) -> dict[str, list[str]]:
    """Names of the groups whose slots are sent to another engine, by what their slots are numbers of."""
    found: dict[str, list[str]] = {}
    for name, group in groups.items():
        if group.numbering is not None:
            found.setdefault(group.numbering, []).append(name)
    return found
