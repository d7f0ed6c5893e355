"""What several engine tests share: driving an engine and accounting for every slot."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from canary_obs.engines.reference.engine import Engine
from canary_obs.engines.reference.request import Request
from canary_obs.engines.reference.traffic import Traffic, scaled_traffic


def drain(engine: Engine, limit: int = 2000) -> list[Request]:
    """Step until nothing is left; the finished requests in order."""
    finished: list[Request] = []
    for _ in range(limit):
        if not engine.has_work():
            return finished
        finished += engine.step()
    raise AssertionError(f"{len(engine.unfinished)} requests unfinished after {limit} steps")


def drive(engine: Engine, steps: int, seed: int, each: Callable[[], None] | None = None) -> list[Request]:
    """Steps under the default load; the finished requests in order."""
    traffic = Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), seed)
    finished: list[Request] = []
    for _ in range(steps):
        traffic.advance(engine)
        finished += engine.step()
        if each is not None:
            each()
    return finished


def account(engine: Engine) -> None:
    """Every slot has exactly one owner: the free list, the prefix cache, or one running request."""
    scheduler = engine.scheduler
    every = np.arange(engine.config.num_slots)
    free = every[scheduler.allocator.is_free(every)]
    own = [request.slots[request.shared : request.allocated] for request in scheduler.running]
    owned = np.concatenate([free, scheduler.cache.held(), *own])
    assert np.array_equal(np.sort(owned), every)
    assert free.size == scheduler.allocator.free_pages * engine.config.page_size
    rows = [request.row for request in scheduler.running]
    assert len(set(rows)) == len(rows)
    assert min(rows, default=0) >= 0
