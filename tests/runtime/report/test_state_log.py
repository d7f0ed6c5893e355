"""What the engine's own log tells of the rank's state, and how often."""

from __future__ import annotations

import logging

import pytest

from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.report.state_log import SECONDS_BETWEEN_LINES, StateLog
from canary_obs.transport.links import ZmqLink
from canary_obs.vocabulary import State
from tests.service.fakes import identity

OK = State.OK, ()
DAMAGED = State.VIOLATED, ("3 violations not acknowledged",)
PAUSED = State.DEGRADED, ("sweeps and patrol are paused",)


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def told(now, caplog):
    state_log = StateLog(identity(), clock=lambda: now[0])

    def tell(*verdict):
        caplog.clear()
        state_log.tell(*verdict)
        return [(record.levelno, record.getMessage()) for record in caplog.records]

    return tell


def test_a_rank_that_was_never_anything_but_ok_says_nothing(told):
    assert told(*OK) == told(*OK) == []


def test_a_change_is_told_once_with_its_reasons(told, now):
    line = "canary_obs: rank 0 of fake/test is violated: 3 violations not acknowledged"
    assert told(*DAMAGED) == [(logging.ERROR, line)]
    now[0] += SECONDS_BETWEEN_LINES
    assert told(*DAMAGED) == []
    assert told(State.VIOLATED, ("4 violations not acknowledged",)) == []


def test_the_end_is_told_as_loud_as_the_beginning(told, now):
    told(*PAUSED)
    now[0] += SECONDS_BETWEEN_LINES
    assert told(*OK) == [(logging.WARNING, "canary_obs: rank 0 of fake/test is ok again")]
    assert told(*OK) == []


def test_another_reason_is_another_line(told, now):
    told(*PAUSED)
    now[0] += SECONDS_BETWEEN_LINES
    ((level, line),) = told(State.DEGRADED, ("sweeps and patrol are paused", "the last sweep failed: no"))
    assert level == logging.WARNING
    assert line.endswith("is degraded: sweeps and patrol are paused; the last sweep failed: no")


def test_what_flickers_is_told_every_few_seconds_and_what_is_worse_at_once(told, now):
    assert len(told(*PAUSED)) == 1
    lines = 0
    for _ in range(400):
        now[0] += 0.25
        lines += len(told(*OK)) + len(told(*PAUSED))
    # Better, and at once worse again.
    assert 2 < lines <= 2 * 400 * 0.25 / SECONDS_BETWEEN_LINES
    assert len(told(*DAMAGED)) == 1


def test_what_was_held_back_is_told_when_it_stays(told, now):
    told(*PAUSED)
    assert told(*OK) == []
    now[0] += SECONDS_BETWEEN_LINES
    assert len(told(*OK)) == 1


# In an engine.


def test_a_violation_stands_in_the_engines_log_without_any_service(make_rig, caplog):
    rig = make_rig(patrol_budget="off", idle_sweep=False, snapshot_seconds=1e-6)
    rig.run(60)
    assert not caplog.records
    slot = int(rig.engine.scheduler.live_slots()[0])
    locate_byte(rig.canary.state.groups[0].view.sources[0], slot, 3).flip(1)
    rig.canary.check_everything()
    rig.canary.idle()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "is violated: " in line
    assert "violations not acknowledged" in line


def test_a_service_that_is_not_there_is_named_with_its_endpoint(make_rig, tmp_path, caplog, monkeypatch):
    endpoint = f"ipc://{tmp_path}/nobody.sock"
    link = ZmqLink(endpoint)
    rig = make_rig(link=link, snapshot_seconds=1e-6, endpoint=endpoint)
    rig.run(5)
    assert not caplog.records
    monkeypatch.setattr(rig.canary.reporter, "_began", rig.canary.reporter._began - 60)
    rig.run(5)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"is degraded: no word from the service at {endpoint} for " in line
