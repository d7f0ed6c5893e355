"""What a sweep may take of one step: its start, and what it would have to wait for."""

from __future__ import annotations

import pytest

from canary_obs.engine_api.views import CachedSlots
from canary_obs.engine_api.walks import CachedWalk
from canary_obs.records import StartSweep
from canary_obs.runtime.sweep import sweeper as module
from canary_obs.vocabulary import SweepStatus


class ComingWalk(CachedWalk):
    """Another walk, whose slots come when a test says so."""

    def __init__(self, walk: CachedWalk) -> None:
        self._walk, self.come, self.taken = walk, False, 0

    @property
    def total(self) -> int:
        return self._walk.total

    @property
    def ready(self) -> bool:
        return self.come

    def take(self, limit: int) -> CachedSlots:
        assert self.come, "it would wait"
        self.taken += 1
        return self._walk.take(limit)


def begun(rig, monkeypatch: pytest.MonkeyPatch) -> ComingWalk:
    rig.run(60)
    rig.finish_requests()
    cache, walks = rig.canary._adapter.prefix_cache, list[ComingWalk]()
    walk = cache.walk

    def coming(group: str) -> CachedWalk:
        walks.append(ComingWalk(walk(group)))
        return walks[0]

    monkeypatch.setattr(cache, "walk", coming)
    rig.canary.sweeper.request(StartSweep(id="test"), rig.canary.step)
    return walks[0]


def clock_of_readings(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each reading of the sweep's clock takes a millisecond: a chunk has three. Returns the time."""
    now = [0.0]

    class Clock:
        time_ns = staticmethod(module.time.time_ns)

        @staticmethod
        def perf_counter() -> float:
            now[0] += 0.001
            return now[0]

    monkeypatch.setattr(module, "time", Clock)
    return now


def test_a_sweep_waits_for_its_walk_in_later_steps(make_rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(patrol_budget="off")
    walk, sweeper = begun(rig, monkeypatch), rig.canary.sweeper
    for _ in range(3):
        sweeper.advance(1.0, rig.canary.counter_reader.next_sequence)
    assert (sweeper.running, sweeper.ending, walk.taken) == (True, False, 0)
    walk.come = True
    while sweeper.running:
        sweeper.advance(1.0, rig.canary.counter_reader.next_sequence)
        rig.canary.counter_reader.poll(rig.canary.step)
    assert sweeper.last is not None
    assert sweeper.last.status is SweepStatus.PASSED
    assert sweeper.last.checked == walk.total > 0


def test_the_start_of_a_sweep_is_taken_from_its_steps_budget(
    make_rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that took the whole of it leaves the slots to the next step."""
    rig = make_rig(patrol_budget="off")
    clock_of_readings(monkeypatch)
    walk, sweeper = begun(rig, monkeypatch), rig.canary.sweeper
    walk.come = True
    sequence = rig.canary.counter_reader.next_sequence
    sweeper.advance(0.0009, sequence)
    assert walk.taken == 0
    sweeper.advance(0.0015, sequence)
    assert walk.taken == 1


def test_a_chunk_that_the_budget_has_no_room_for_is_left_to_the_next_step(
    make_rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the one before took, of the host's time and of the device's."""
    rig = make_rig(patrol_budget="off")
    clock_of_readings(monkeypatch)
    monkeypatch.setattr(module, "_CPU_CHUNK", 8)
    walk, sweeper = begun(rig, monkeypatch), rig.canary.sweeper
    walk.come = True
    sequence = rig.canary.counter_reader.next_sequence
    sweeper.advance(0.0005, sequence)  # takes what the start has left of it
    for budget, chunks in ((0.0025, 1), (0.0062, 2), (0.0085, 2), (0.0095, 3)):
        taken = walk.taken
        sweeper.advance(budget, sequence)
        assert walk.taken - taken == chunks, budget
    check = sweeper._check_chunk
    monkeypatch.setattr(sweeper, "_check_chunk", lambda current: (0.002, check(current)[1]))
    for budget, chunks in ((0.009, 1), (0.0105, 2)):
        taken = walk.taken
        sweeper.advance(budget, sequence)
        assert walk.taken - taken == chunks, budget
    assert not sweeper.ending
