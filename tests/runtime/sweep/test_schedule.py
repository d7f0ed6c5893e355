"""When automatic sweeps start: idle, old, after failures, after a cancellation; paused or not."""

from __future__ import annotations

import time

import pytest

from canary_obs.config import CanaryConfig
from canary_obs.errors import UnsupportedEngine
from canary_obs.records import CancelSweep, Pause, Resume, StartSweep
from canary_obs.runtime.sweep.schedule import SweepSchedule
from canary_obs.vocabulary import State, SweepStatus, Trigger
from tests.links import OneThreadLink

FAILED, PASSED, CANCELLED = SweepStatus.FAILED, SweepStatus.PASSED, SweepStatus.CANCELLED


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def no_step_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tasks rotate, one runs in each step: these tests count steps, whatever time they take."""
    monkeypatch.setattr("canary_obs.runtime.step_scheduler._SECONDS_BETWEEN_TASKS", 0.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def waits(schedule: SweepSchedule, clock: Clock, polls: float = 0.02) -> float:
    """Seconds until an idle engine, which asks every `polls` seconds, would sweep."""
    began = clock.now
    while not schedule.idle_due(0.0):
        clock.now += polls
        assert clock.now - began < 1000.0
    return clock.now - began


def test_failures_wait_twice_as_long_each_time_up_to_a_minute(clock) -> None:
    schedule = SweepSchedule(CanaryConfig(), clock)
    assert waits(schedule, clock) == 0.0
    found = []
    for number in range(7):
        schedule.ended(FAILED, f"reason {number}")
        found.append(round(waits(schedule, clock)))
        assert schedule.error == f"reason {number}"
    assert found == [10, 20, 40, 60, 60, 60, 60]
    schedule.ended(PASSED, None)
    assert schedule.error is None
    schedule.ended(FAILED, "again")
    assert round(waits(schedule, clock)) == 10


def test_a_cancelled_sweep_is_not_started_again_at_once_and_hides_no_failure(clock) -> None:
    schedule = SweepSchedule(CanaryConfig(), clock)
    schedule.ended(FAILED, "no cache")
    clock.now += 9.0
    schedule.ended(CANCELLED, None)
    assert schedule.error == "no cache"
    assert round(waits(schedule, clock)) == 10


def test_a_sweep_half_as_old_as_allowed_is_due_while_busy(clock) -> None:
    schedule = SweepSchedule(CanaryConfig(), clock)
    schedule.ended(PASSED, None)
    clock.now += 1800.0
    assert not schedule.age_due(0.0)
    clock.now += 0.1
    assert schedule.age_due(0.0)
    assert not SweepSchedule(CanaryConfig(busy_sweep=False), clock).age_due(0.0)


def steps(rig, true, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, rig.canary.verdict()
        rig.run(1)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_engine_that_is_never_idle_sweeps_and_stays_ok(make_rig, clock, on_gpu) -> None:
    """Seven hours of an engine with nothing but steps, by the schedule's clock."""
    rig = make_rig(snapshot_seconds=1e-6)
    canary = rig.canary
    canary._scheduler._rotating = on_gpu
    canary.run.ready_at = clock.now
    canary.sweeper.schedule._clock = clock
    rig.run(30)
    for hour in range(7):
        clock.now += 1801.0
        passed = canary.sweeper.passes[Trigger.INTERVAL]
        steps(rig, lambda passed=passed: canary.sweeper.passes[Trigger.INTERVAL] > passed)
        assert canary.sweeper.schedule.last_completed == clock.now, hour
    assert canary.sweeper.passes[Trigger.IDLE] == 0
    assert canary.counter_reader.violations == 0


def test_a_busy_sweep_advances_by_its_budget(make_rig, clock) -> None:
    rig = make_rig(sweep_budget_ms=1e-3)
    canary = rig.canary
    rig.run(60)
    canary.sweeper.schedule._clock = clock
    canary.run.ready_at = clock.now - 1801.0
    rig.run(1)
    assert canary.sweeper.running
    began = canary.step
    steps(rig, lambda: not canary.sweeper.running)
    assert canary.step > began  # not in one step
    assert canary.sweeper.last.status is PASSED


def test_no_sweep_starts_while_paused(make_rig, clock) -> None:
    link = OneThreadLink()
    rig = make_rig(link=link)
    canary = rig.canary
    link.send_command(Pause())
    rig.run(3)
    canary.sweeper.schedule._clock = clock
    canary.run.ready_at = clock.now - 1801.0
    rig.run(20)
    assert not canary.idle()
    assert not canary.sweeper.running
    link.send_command(Resume())
    rig.run(2)
    assert canary.sweeper.last is not None or canary.sweeper.running


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("idle", [False, True])
def test_a_sweep_cancelled_while_paused_ends(make_rig, idle, on_gpu) -> None:
    link = OneThreadLink()
    rig = make_rig(link=link, idle_sweep=False, sweep_budget_ms=1e-3)
    canary = rig.canary
    canary._scheduler._rotating = on_gpu
    rig.run(60)
    canary.sweeper.request(StartSweep(id="a"), canary.step)
    canary.run.paused = True
    rig.run(15)
    assert canary.sweeper.running
    link.send_command(CancelSweep(id="a"))
    if idle:
        for _ in range(3):
            canary.idle()
    else:
        rig.run(40)
    assert not canary.sweeper.running
    assert canary.sweeper.last.status is CANCELLED


def test_a_paused_sweep_does_not_keep_an_idle_engine_awake(make_rig) -> None:
    rig = make_rig(idle_sweep=False, sweep_budget_ms=1e-3)
    canary = rig.canary
    rig.run(60)
    canary.sweeper.request(StartSweep(id="a"), canary.step)
    canary.run.paused = True
    canary.idle()
    assert not canary.idle()


@pytest.mark.parametrize("error", [UnsupportedEngine("the cache is closed"), ZeroDivisionError("the walk")])
def test_a_failing_idle_sweep_backs_off_and_names_its_reason(make_rig, monkeypatch, unchecked, error) -> None:
    """An idle engine asks every 20 ms; each failed attempt was a walk over the whole cache."""
    rig = make_rig(idle_sweep_seconds=0.001)
    rig.run(20)
    rig.finish_requests()
    attempts = []

    def fail(*_: object, **__: object) -> None:
        attempts.append(time.monotonic())
        raise error

    monkeypatch.setattr(rig.canary._adapter.prefix_cache, "cached", fail)
    clock = Clock()
    rig.canary.sweeper.schedule = SweepSchedule(rig.canary.config, clock)
    rig.canary.run.ready_at = 0.0
    for _ in range(1000):
        clock.now += 0.02
        rig.canary.idle()
    assert 2 <= len(attempts) <= 15  # 1, 2, 4 ... ms, not 1000 times
    state, reasons = rig.canary.verdict()
    assert state is (State.DEGRADED if isinstance(error, UnsupportedEngine) else State.BLIND)
    assert any(str(error) in reason for reason in reasons)
    if isinstance(error, UnsupportedEngine):
        way = "sweeps of the prefix cache fail"
        unchecked(way, "reference", (state, reasons), names="the last sweep failed", seconds=0.0)
