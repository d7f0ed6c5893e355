"""Sweeps outlive the service in a file, which is written whole or not at all."""

from __future__ import annotations

import stat

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.errors import ConfigurationError
from canary_obs.hub.commands import StartSweepRequest
from canary_obs.hub.hub import Hub
from canary_obs.serve import ServiceThread
from canary_obs.service.state_file import StateFile
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import State, SweepStatus
from tests.service.conftest import FakeRank
from tests.service.fakes import eventually


def test_a_sweep_is_there_after_a_restart(tmp_path):
    config = ServiceConfig(port=0, state_file=str(tmp_path / "state.json"), snapshot_stale_seconds=600.0)
    first = ServiceThread(config, link=LocalLink())
    rank = FakeRank(first.hub, finishes=False)
    record = first.hub.start_sweep(StartSweepRequest(budget_ms=2.5))
    first.close()
    assert stat.S_IMODE((tmp_path / "state.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    second = ServiceThread(config, link=LocalLink())
    try:
        assert second.hub.sweep(record.id).request.budget_ms == 2.5
        rank.hub = second.hub
        rank.report(record.id, SweepStatus.PASSED)
        assert second.hub.sweep(record.id).status is SweepStatus.PASSED
    finally:
        second.close()


def test_a_change_is_written_while_the_service_runs(tmp_path, hub, rank):
    path = tmp_path / "state.json"
    kept = StateFile(path, hub)
    try:
        record = hub.start_sweep(StartSweepRequest())
        eventually(lambda: record.id in path.read_text())
    finally:
        kept.close()


@pytest.mark.parametrize(
    ("content", "rule"), [("{", "not what this release wrote"), ('{"format": "other"}', "not what")]
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, content, rule):
    path = tmp_path / "state.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=rule):
        StateFile(path, Hub())
    assert path.read_text() == content


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be written: No such file"):
        StateFile(tmp_path / "none/state.json", Hub())
    with pytest.raises(ConfigurationError, match="KV_CANARY_STATE_FILE"):
        ServiceThread(ServiceConfig(port=0, state_file=str(tmp_path / "none/s")), link=LocalLink())


def test_a_disk_that_fills_up_degrades_and_the_service_goes_on(tmp_path, hub, rank):
    (tmp_path / "folder").mkdir()
    kept = StateFile(tmp_path / "folder/state.json", hub)
    (tmp_path / "folder").rename(tmp_path / "gone")
    hub.start_sweep(StartSweepRequest())
    try:
        eventually(lambda: hub.verdict()[0] is State.DEGRADED)
        assert any("state_file" in reason for reason in hub.verdict()[1])
    finally:
        kept.close()
