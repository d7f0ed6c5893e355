"""Which changes of the rank's state are logged, and how often."""

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
def logged(now, caplog):
    state_log = StateLog(identity(), clock=lambda: now[0])

    def update(*verdict):
        caplog.clear()
        state_log.update(*verdict)
        return [(record.levelno, record.getMessage()) for record in caplog.records]

    return update


def test_a_rank_that_is_always_ok_logs_nothing(logged):
    assert logged(*OK) == logged(*OK) == []


def test_a_change_is_logged_once_with_its_reasons(logged, now):
    line = "canary_obs: rank 0 of fake/test is violated: 3 violations not acknowledged"
    assert logged(*DAMAGED) == [(logging.ERROR, line)]
    now[0] += SECONDS_BETWEEN_LINES
    assert logged(*DAMAGED) == []
    assert logged(State.VIOLATED, ("4 violations not acknowledged",)) == []
    assert logged(State.VIOLATED, ("1 violation not acknowledged",)) == []


def test_ok_again_is_logged_as_a_warning(logged, now):
    logged(*PAUSED)
    now[0] += SECONDS_BETWEEN_LINES
    assert logged(*OK) == [(logging.WARNING, "canary_obs: rank 0 of fake/test is ok again")]
    assert logged(*OK) == []


def test_another_reason_is_another_line(logged, now):
    logged(*PAUSED)
    now[0] += SECONDS_BETWEEN_LINES
    ((level, line),) = logged(State.DEGRADED, ("sweeps and patrol are paused", "the last sweep failed: no"))
    assert level == logging.WARNING
    assert line.endswith("is degraded: sweeps and patrol are paused; the last sweep failed: no")


def test_a_flickering_state_is_rate_limited_and_a_worse_one_is_not(logged, now):
    assert len(logged(*PAUSED)) == 1
    lines = 0
    for _ in range(400):
        now[0] += 0.25
        lines += len(logged(*OK)) + len(logged(*PAUSED))
    # Better, and at once worse again.
    assert 2 < lines <= 2 * 400 * 0.25 / SECONDS_BETWEEN_LINES
    assert len(logged(*DAMAGED)) == 1


def test_a_delayed_line_is_logged_when_the_state_stays(logged, now):
    logged(*PAUSED)
    assert logged(*OK) == []
    now[0] += SECONDS_BETWEEN_LINES
    assert len(logged(*OK)) == 1


# In an engine.


def test_a_violation_is_logged_without_a_service(make_rig, caplog):
    rig = make_rig(patrol_budget="off", idle_sweep=False, snapshot_seconds=1e-6)
    rig.run(60)
    assert not caplog.records
    slot = int(rig.engine.scheduler.live_slots()[0])
    locate_byte(rig.canary.state.groups[0].view.sources[0], slot, 3).flip(1)
    rig.canary.check_everything()
    rig.canary.idle()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "is violated: " in line
    assert "violation not acknowledged" in line


def test_a_missing_service_is_logged_with_its_endpoint(make_rig, tmp_path, caplog, monkeypatch):
    endpoint = f"ipc://{tmp_path}/nobody.sock"
    link = ZmqLink(endpoint)
    rig = make_rig(link=link, snapshot_seconds=1e-6, endpoint=endpoint)
    rig.run(5)
    assert not caplog.records
    monkeypatch.setattr(rig.canary.reporter, "_began", rig.canary.reporter._began - 60)
    rig.run(5)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"is degraded: no message from the service at {endpoint} for " in line
