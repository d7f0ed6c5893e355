"""What several engine tests share: driving an engine and accounting for every slot."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Request, Sampling
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic


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
    if scheduler.windows is not None:
        account_windows(engine)
    owned = np.concatenate([free, scheduler.cache.held(), *own])
    assert np.array_equal(np.sort(owned), every)
    assert free.size == scheduler.allocator.free_pages * engine.config.page_size
    rows = [request.row for request in scheduler.running]
    assert len(set(rows)) == len(rows)
    assert min(rows, default=0) >= 0


def answer(engine: Engine, number: int, length: int = 60, tokens: int = 4) -> list[int]:
    """Run one greedy request alone; prompts of different numbers share no prefix."""
    prompt = ((np.arange(length) * 7 + number) % 250).astype(np.int32)
    request = engine.add_request(prompt, Sampling(max_tokens=tokens, stop_at_eos=False))
    drain(engine)
    return [int(token) for token in request.output]


def account_windows(engine: Engine) -> None:
    """Every window slot is free or has one owner, a full slot in use; all that is seen is resident."""
    scheduler, config = engine.scheduler, engine.config
    assert scheduler.windows is not None
    slots, every = scheduler.windows.slots, np.arange(config.num_slots)
    (mapped,) = np.nonzero(slots.of >= 0)
    assert np.array_equal(slots.owner[slots.of[mapped]], mapped)
    assert slots.free_slots + mapped.size == config.swa_slots
    assert not scheduler.allocator.is_free(mapped).any()
    locks = np.zeros(config.num_slots, dtype=np.int64)
    for request in scheduler.running:
        seen = request.slots[request.window_start : request.computed]
        assert slots.resident(seen).all()
        assert request.window_start <= max(0, request.computed - slots.window + 1)
        generated = request.slots[max(request.shared, request.prompt_length) : request.window_start]
        assert not slots.resident(generated).any()
        locks[request.slots[request.window_start : request.shared]] += 1
    assert np.array_equal(slots.locks[every], locks)
