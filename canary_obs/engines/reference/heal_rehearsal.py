"""Tries what healing does on a small engine of its own, before it is done to real requests."""

from __future__ import annotations

import numpy as np

from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling, Status

_PROMPT = np.arange(4, 24, dtype=np.int32)


def rehearse_healing(engine: Engine) -> str | None:
    """Why this engine allows no more than a dry run; None = every function acts as expected."""
    if engine.shard is not None and engine.shard.size > 1:
        return f"each of the engine's {engine.shard.size} ranks schedules by itself: they would differ"
    try:
        found = _played(type(engine)(settings.tiny(page_size=4)))
    except Exception as error:  # noqa: BLE001 - whatever differs in this version
        return f"the rehearsal of healing failed ({type(error).__name__}: {error})"
    return f"the rehearsal of healing did not agree: {found}" if found else None


def _played(engine: Engine) -> str | None:
    """What does not agree: one request is computed again, another is ended, its cached prefix is evicted."""
    scheduler = engine.scheduler
    free = scheduler.allocator.free_pages
    first = engine.add_request(_PROMPT, Sampling(max_tokens=1, stop_at_eos=False))
    while engine.has_work():
        engine.step()
    again, ended = (
        engine.add_request(_PROMPT, Sampling(max_tokens=3, stop_at_eos=False), name)
        for name in ("again", "ended")
    )
    engine.before_commit = lambda: _hurt(engine)  # type: ignore[method-assign]
    returned = engine.step()
    del engine.before_commit
    if returned != (ended,) or ended.status is not Status.FAILED or ended.output.size:
        return "a request that was ended was not returned as failed"
    if again.done or again.row >= 0 or again.output.size:
        return "a request that is to be computed again was not set back"
    if scheduler.cache.size:
        return "an evicted page is still in the prefix cache"
    while engine.has_work():
        engine.step()
    if again.status is not Status.FINISHED or again.output[0] != first.output[0]:
        return "a request that was computed again gave another answer"
    page = int(scheduler.cache.held()[0]) // 4
    scheduler.allocator.withdraw(page)
    scheduler.cache.discard(scheduler.cache.roots[0], 0)
    left = scheduler.allocator.free_pages
    scheduler.allocator.restore(page)
    if (left, scheduler.allocator.free_pages) != (free - 1, free):
        return f"{free} pages were free, {left} with one withdrawn, then {scheduler.allocator.free_pages}"
    return None


def _hurt(engine: Engine) -> None:
    scheduler = engine.scheduler
    scheduler.cache.discard(scheduler.cache.roots[0], 0)
    engine.recompute("again", 0)
    engine.fail("ended")
