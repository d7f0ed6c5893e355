"""Sweeps over a real vLLM's prefix cache whose walk leaves blocks out: what the canary says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from canary_obs.engine_api.views import CachedSlots
from canary_obs.engine_api.walks import CachedWalk, WholeWalk
from canary_obs.engines.vllm.pool_events import Published, PublishedRun
from canary_obs.vocabulary import State, SweepStatus
from tests.engines.vllm.real.forwards import acknowledge, replaced
from tests.engines.vllm.real.rig import Rig, prompts

COUNTS, LEFT_OUT = "different slots in the prefix cache, the engine counts", "were left out as evicted"


def part_of(cached: CachedSlots, keep: slice) -> CachedSlots:
    """These of the cached slots."""
    return CachedSlots(
        slots=cached.slots[keep], positions=cached.positions[keep], previous=cached.previous[keep]
    )


def walks(rig: Rig) -> dict[str, tuple[str, Callable[..., Any], str]]:
    """By way: the method of the prefix cache that is replaced, by what, and the reason."""
    cache = rig.adapter.cached_blocks

    def nothing(group: str) -> CachedWalk:
        return WholeWalk(part_of(cache.cached(group, unlocked_only=False), slice(0)))

    def half(group: str) -> CachedWalk:
        return WholeWalk(part_of(cache.cached(group, unlocked_only=False), slice(None, None, 2)))

    def gone(group: str, slots: Any) -> Any:
        return slots < 0

    return {
        "a sweep's walk yields nothing": ("walk", nothing, COUNTS),
        "a sweep's walk yields half of the cache": ("walk", half, COUNTS),
        "a sweep takes cached slots for evicted ones": ("still_cached", gone, LEFT_OUT),
    }


def lost_events(rig: Rig) -> dict[str, Any]:
    """The scheduler's events of newly cached blocks are lost on the way to the worker."""
    blocks = rig.adapter.cached_blocks
    apply = blocks.apply

    def fewer(events: Any, counts: Any = None) -> None:
        apply([event for event in events if not isinstance(event, Published | PublishedRun)], counts)

    with replaced(blocks, "apply", fewer):
        rig.generate(prompts(2, seed=77, shared=100), 4)
    return seen(rig)


def seen(rig: Rig) -> dict[str, Any]:
    """The verdict after a sweep, and its seconds."""
    started = time.monotonic()
    rig.settle()
    seconds = time.monotonic() - started
    last = rig.canary.sweeper.last
    assert last is not None
    assert last.status is SweepStatus.FAILED
    state, reasons = rig.canary.verdict()
    return {"state": str(state), "reasons": list(reasons), "seconds": seconds}


def tried(rig: Rig) -> dict[str, dict[str, Any]]:
    """Of every way: the verdict, the reason to look for, and the seconds of the sweep."""
    rig.fresh()
    rig.generate(prompts(4, seed=6, shared=100), 4)
    rig.settle()
    acknowledge(rig)
    assert rig.canary.verdict() == (State.OK, ()), rig.canary.verdict()
    report = {}
    for way, (method, wrong, names) in walks(rig).items():
        with replaced(rig.adapter.cached_blocks, method, wrong):
            report[way] = seen(rig) | {"names": names}
        rig.settle()
        assert rig.canary.verdict() == (State.OK, ()), (way, rig.canary.verdict())
    report["events of cached blocks are lost"] = lost_events(rig) | {"names": COUNTS}
    rig.fresh()
    rig.generate(prompts(1), 2)  # brings the worker the reset
    rig.settle()
    assert rig.canary.verdict() == (State.OK, ()), rig.canary.verdict()
    return report
