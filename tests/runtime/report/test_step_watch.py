"""A step that lasts is reported by the link's thread, and nothing else is."""

from __future__ import annotations

import threading

import pytest

from canary_obs.records import Snapshot, StepUnderWay
from canary_obs.runtime.report.step_watch import StepWatch
from canary_obs.runtime.run_state import RunState
from canary_obs.transport.links import LocalLink
from tests.service.fakes import identity


class Engine:
    """A run state whose step is under way, and a clock that only the test advances."""

    def __init__(self) -> None:
        self.now, self.in_step = 100.0, True
        self.run = RunState(armed=True, last_step_end=99.0)
        self.snapshots = 3
        self.watch = StepWatch(
            identity(), self.run, lambda: self.in_step, lambda: self.snapshots, lambda: self.now
        )

    def reports(self, polls: int, seconds: float = 0.125) -> list[float]:
        found = []
        for _ in range(polls):
            if (report := self.watch.report()) is not None:
                found.append(round(report.seconds, 1))
            self.now += seconds
        return found


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_step_that_lasts_is_reported_twice_a_second(engine) -> None:
    assert engine.reports(25) == [1.0, 1.5, 2.0, 2.5, 3.0]


def test_an_engine_that_steps_is_not_in_one_long_step(engine) -> None:
    for _ in range(100):
        engine.run.step += 1
        engine.run.last_step_end = engine.now
        assert engine.reports(5) == []


@pytest.mark.parametrize("why", ["idle", "detached"])
def test_silence_of_an_engine_without_a_step_is_not_excused(engine, why) -> None:
    engine.in_step = why != "idle"
    engine.run.armed = why != "detached"
    assert engine.reports(100) == []


def test_an_engine_that_makes_snapshots_is_in_no_long_step(engine) -> None:
    """An idle engine's thread holds the lock for a moment in each call, just when it is asked."""
    assert engine.reports(20)
    for _ in range(20):
        engine.snapshots += 1
        assert engine.reports(3) == []


def test_a_second_long_step_starts_from_zero(engine) -> None:
    assert engine.reports(30)
    engine.run.step += 1
    assert engine.reports(8) == []
    assert engine.reports(8)[0] == 1.0


def test_a_forward_of_a_real_engine_is_reported_while_it_lasts(make_rig, monkeypatch) -> None:
    """The engine's thread is in its forward; the link is asked by another thread, as a service does."""
    link = LocalLink()
    rig = make_rig(link=link)
    rig.run(3)
    monkeypatch.setattr("canary_obs.runtime.report.step_watch._FIRST_SECONDS", 0.05)
    monkeypatch.setattr("canary_obs.runtime.report.step_watch._INTERVAL_SECONDS", 0.01)
    release, inside = threading.Event(), threading.Event()
    write = rig.engine.runner.pool.write

    def waiting(*given: object) -> None:
        inside.set()
        assert release.wait(30.0)
        write(*given)

    def drain() -> list[object]:
        return list(iter(lambda: link.next_message(0.01), None))

    vars(rig.engine.runner.pool)["write"] = waiting
    thread = threading.Thread(target=rig.run, args=(1,))
    thread.start()
    try:
        assert inside.wait(30.0)
        while (message := link.next_message(0.02)) is None or not isinstance(message, StepUnderWay):
            assert message is None or thread.is_alive()
        assert message.identity == rig.canary.reporter.identity
        assert message.seconds >= 0.05
    finally:
        release.set()
        thread.join()
        del vars(rig.engine.runner.pool)["write"]
    link.background = None
    rig.run(20)
    assert any(isinstance(found, Snapshot) for found in drain())
