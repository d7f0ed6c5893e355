"""A sweep that checks less than the engine's prefix cache holds, by the engine's own count, fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from canary_obs.engine_api.views import CachedSlots
from canary_obs.records import StartSweep, SweepProgress
from canary_obs.runtime.sweep import sweeper as sweeper_module
from canary_obs.vocabulary import State, SweepStatus, Trigger
from tests.late_copies import late_copies
from tests.runtime.sweep.test_sweeper import sweep_now
from tests.sizes import sized
from tests.unchecked import Report

COUNTS, LEFT_OUT = "different slots in the prefix cache, the engine counts", "were left out as evicted"


def part(cached: CachedSlots, keep: slice) -> CachedSlots:
    return CachedSlots(
        slots=cached.slots[keep], positions=cached.positions[keep], previous=cached.previous[keep]
    )


def twice(cached: CachedSlots) -> CachedSlots:
    """As many slots as there are, but half of them twice instead of the others."""
    half = part(cached, slice(None, None, 2))
    columns = (torch.cat((column, column))[: cached.slots.numel()] for column in
               (half.slots, half.positions, half.previous))  # fmt: skip
    return CachedSlots(**dict(zip(("slots", "positions", "previous"), columns, strict=True)))


WALKS: dict[str, Callable[[CachedSlots], CachedSlots]] = {
    "a sweep's walk yields nothing": lambda cached: part(cached, slice(0)),
    "a sweep's walk yields half of the cache": lambda cached: part(cached, slice(None, None, 2)),
    "a sweep's walk yields half of the cache twice": twice,
}


def swept(make_rig, **settings: object) -> Any:
    rig = make_rig(idle_sweep=False, patrol_budget="off", **settings)
    rig.run(60)
    rig.finish_requests()
    assert sweep_now(rig).status is SweepStatus.PASSED
    assert rig.canary.verdict() == (State.OK, ())
    return rig


def refused(rig: Any) -> tuple[SweepProgress, float]:
    """A sweep that does not pass, and its seconds; nothing counts it as completed."""
    sweeper = rig.canary.sweeper
    before = sweeper.schedule.last_completed, sweeper.last_completed_ns, dict(sweeper.passes)
    started = time.monotonic()
    result = sweep_now(rig)
    seconds = time.monotonic() - started
    assert result.status is SweepStatus.FAILED
    assert (sweeper.schedule.last_completed, sweeper.last_completed_ns, dict(sweeper.passes)) == before
    assert rig.canary.verdict() == (State.DEGRADED, (f"the last sweep failed: {result.error}",))
    return result, seconds


@pytest.mark.parametrize(
    ("way", "model"),
    [(way, model) for way in WALKS for model in ("llama", "swa", "compressed")
     if model == "llama" or way == sized(way, "a sweep's walk yields half of the cache twice")],
)  # fmt: skip
def test_a_walk_that_leaves_slots_out(make_rig, unchecked: Report, model: str, way: str) -> None:
    rig = swept(make_rig, model=model)
    cache = rig.canary._adapter.prefix_cache
    walk, total = cache.cached, cache.count("full").slots
    cache.cached = lambda group, *, unlocked_only: WALKS[way](walk(group, unlocked_only=unlocked_only))
    result, seconds = refused(rig)
    assert f"{COUNTS} {total}" in str(result.error)
    if model == "llama":
        unchecked(way, "reference", rig.canary.verdict(), names=COUNTS, seconds=seconds)
    vars(cache).pop("cached")
    assert sweep_now(rig).status is SweepStatus.PASSED
    assert rig.canary.verdict() == (State.OK, ())


@pytest.mark.parametrize("unlocked_only", [False, True])
def test_the_whole_cache_is_counted_also_where_a_part_is_swept(make_rig, unlocked_only: bool) -> None:
    rig = swept(make_rig)
    cache = rig.canary._adapter.prefix_cache
    walk = cache.cached
    cache.cached = lambda group, *, unlocked_only: part(walk(group, unlocked_only=unlocked_only), slice(9))
    assert COUNTS in str(sweep_now(rig, unlocked_only=unlocked_only).error)


def test_a_part_of_a_cache_is_swept_and_all_of_it_counted(make_rig) -> None:
    rig = swept(make_rig)
    result = sweep_now(rig, unlocked_only=True)
    assert result.status is SweepStatus.PASSED, result
    assert result.checked > 0


def test_slots_with_a_baseline_are_accounted_for(make_rig) -> None:
    rig = swept(make_rig)
    rig.canary.received(
        "full", rig.canary._adapter.prefix_cache.cached("full", unlocked_only=False).slots[:4]
    )
    result = sweep_now(rig)
    assert result.status is SweepStatus.PASSED, result
    assert rig.canary.verdict() == (State.OK, ())


def test_slots_that_are_said_to_be_evicted(make_rig, unchecked: Report) -> None:
    rig = swept(make_rig)
    cache = rig.canary._adapter.prefix_cache
    cache.still_cached = lambda group, slots: torch.zeros_like(slots, dtype=torch.bool)
    result, seconds = refused(rig)
    assert str(result.error).startswith(f"{result.total} slots of group full {LEFT_OUT}, but the engine")
    way = "a sweep takes cached slots for evicted ones"
    unchecked(way, "reference", rig.canary.verdict(), names=LEFT_OUT, seconds=seconds)


def test_a_sweep_that_launches_too_few_slots(
    make_rig, unchecked: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = swept(make_rig)
    verify = sweeper_module.verify_list

    def fewer(backend, buffers, slots, positions, previous, phase) -> None:
        verify(backend, buffers, slots[1:].clone(), positions[1:].clone(), previous[1:].clone(), phase)

    monkeypatch.setattr(sweeper_module, "verify_list", fewer)
    result, seconds = refused(rig)
    assert f"of {result.total} slots of group full are unaccounted for" in str(result.error)
    unchecked(
        "a sweep launches too few slots", "reference", rig.canary.verdict(),
        names="slots of group full are unaccounted for", seconds=seconds,
    )  # fmt: skip


def test_a_group_that_a_sweep_leaves_out(make_rig, unchecked: Report) -> None:
    rig = swept(make_rig, model="swa")
    rig.canary.sweeper.request(StartSweep(id="all"), rig.canary.step)
    rig.canary.sweeper._pass.work.pop()
    started = time.monotonic()
    while rig.canary.sweeper.running:
        rig.engine.idle()
    seconds = time.monotonic() - started
    assert "group swa was not swept" in str(rig.canary.sweeper.last.error)
    unchecked(
        "a sweep leaves a group out", "reference", rig.canary.verdict(), names="group swa was not swept",
        seconds=seconds,
    )  # fmt: skip


def test_errors_of_two_groups_do_not_cancel(make_rig) -> None:
    """As many slots too many in one group as are missing in the other."""
    rig = swept(make_rig, model="swa")
    sweeper = rig.canary.sweeper
    sweeper.request(StartSweep(id="all"), rig.canary.step)
    full, swa = (sweeper._shares._debts[group.index] for group in rig.canary.state.groups)
    full.slots, swa.slots = full.slots + 5, swa.slots - 5
    while sweeper.running:
        rig.engine.idle()
    error = str(sweeper.last.error)
    assert "5 of" in error
    assert "-5 of" in error


def test_a_sweep_ends_with_the_copy_that_holds_its_last_results(
    make_rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy of the counters arrives one copy late."""
    rig = swept(make_rig)
    late_copies(monkeypatch)
    for _ in range(3):
        sequence = rig.canary.counter_reader.next_sequence
        assert sweep_now(rig).status is SweepStatus.PASSED
        assert rig.canary.counter_reader.newest_sequence >= sequence


def test_an_engine_that_does_not_count_its_cache(make_rig, unchecked: Report) -> None:
    rig = swept(make_rig)
    cache = rig.canary._adapter.prefix_cache
    cache.count = lambda group: None
    started = time.monotonic()
    assert sweep_now(rig).status is SweepStatus.PASSED
    names = "this engine does not count its cached slots"
    unchecked(
        "the engine does not count its cached slots", "reference", rig.canary.verdict(), names=names,
        seconds=time.monotonic() - started,
    )  # fmt: skip


def test_an_automatic_sweep_of_a_part_is_counted_too(make_rig) -> None:
    rig = swept(make_rig, unlocked_only=True)
    rig.canary.sweeper.begin_automatic(Trigger.IDLE, rig.canary.step)
    while rig.canary.sweeper.running:
        rig.engine.idle()
    assert rig.canary.sweeper.last.status is SweepStatus.PASSED
