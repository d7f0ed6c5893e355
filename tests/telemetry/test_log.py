from __future__ import annotations

import io
import json
import os
import threading

import msgspec
import pytest

from canary_obs.errors import ConfigurationError
from canary_obs.hub.hub import Hub
from canary_obs.records import Violations
from canary_obs.telemetry.audit import AuditEvent, audit_fields
from canary_obs.telemetry.log import EventLog, open_log, violation_fields
from tests.service.fakes import eventually, identity, violation


def report(log, *rows):
    hub = Hub()
    hub.subscribe(log)
    hub.ingest(Violations(identity=identity(), rows=rows), lambda command: None)


def test_one_line_of_json_per_violation(tmp_path):
    log = open_log(str(tmp_path / "v.log"), violation_fields)
    report(log, violation(1), violation(2, expected=None, actual=None))
    log.close()
    first, second = map(json.loads, (tmp_path / "v.log").read_text().splitlines())
    assert (first["event"], first["level"], first["slot"]) == ("kv_cache_violation", "error", 1)
    assert (first["reason"], first["phase"], first["group"], first["part"]) == (
        "kv_data",
        "sweep",
        "full",
        "k",
    )
    assert first["timestamp"] == "2023-11-14T22:13:20+00:00"
    assert (first["engine"], first["instance"], first["rank"]) == ("fake", "test", 0)
    assert second["expected"] is None
    assert log.dropped == 0


PAUSE = AuditEvent(
    time_ns=1_700_000_000_000_000_000,
    method="POST",
    route="/canary/pause",
    path="/canary/pause",
    scope="operate",
    token="oncall",
    client="10.0.0.7",
    status=202,
    location=None,
    seconds=0.5,
)


@pytest.mark.parametrize(
    ("status", "outcome", "level"),
    [
        (200, "done", "info"),
        (202, "done", "info"),
        (403, "refused", "warning"),
        (429, "refused", "warning"),
        (503, "failed", "warning"),
        (None, "failed", "warning"),
    ],
)
def test_one_line_of_json_per_audited_request(tmp_path, status, outcome, level):
    log = open_log(str(tmp_path / "v.log"), audit_fields)
    log((msgspec.structs.replace(PAUSE, status=status),))
    log.close()
    assert json.loads((tmp_path / "v.log").read_text()) == {
        "event": "order",
        "timestamp": "2023-11-14T22:13:20+00:00",
        "level": level,
        "outcome": outcome,
        "method": "POST",
        "route": "/canary/pause",
        "path": "/canary/pause",
        "scope": "operate",
        "token": "oncall",
        "client": "10.0.0.7",
        "status": status,
        "location": None,
        "seconds": 0.5,
    }


def test_without_a_file_it_goes_to_standard_error(capsys):
    log = open_log("", violation_fields)
    report(log, violation(8))
    log.close()
    assert json.loads(capsys.readouterr().err)["slot"] == 8


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_full_disk_is_counted_and_raises_nothing(caplog):
    log = open_log("/dev/full", violation_fields)
    report(log, violation(), violation())
    log.close()
    assert log.dropped == 2
    assert caplog.text.count("cannot be written") == 1


def test_a_disk_with_space_again_is_used_again():
    class Broken(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    kept = io.StringIO()
    files = [Broken(), kept]
    kept.close = lambda: None
    log = EventLog(violation_fields, lambda: files.pop(0))
    report(log, violation(1), violation(2))
    log.close()
    assert log.dropped == 1
    assert json.loads(kept.getvalue())["slot"] == 2


def test_a_slow_disk_delays_no_caller():
    release, entered = threading.Event(), threading.Event()

    lines = []

    class Slow(io.StringIO):
        def write(self, text):
            entered.set()
            release.wait(30)
            lines.append(text)
            return len(text)

    log = EventLog(violation_fields, Slow, capacity=2)
    report(log, violation())
    assert entered.wait(30)
    report(log, *(violation(slot) for slot in range(5)))
    assert log.dropped == 3
    release.set()
    log.close()
    assert len(lines) == 3


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_a_new_file_is_for_its_owner_alone(tmp_path, umask):
    """It names requests, tokens and addresses."""
    path = tmp_path / "v.log"
    before = os.umask(umask)
    try:
        log = open_log(str(path), violation_fields)
        assert path.stat().st_mode & 0o777 == 0o600
        path.unlink()  # as rotation does
        report(log, violation(1))
        log.close()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_made_for_a_log_shipper_keeps_its_mode(tmp_path):
    path = tmp_path / "v.log"
    path.touch()
    path.chmod(0o640)
    log = open_log(str(path), violation_fields)
    report(log, violation(1))
    log.close()
    assert path.stat().st_mode & 0o777 == 0o640
    assert len(path.read_text().splitlines()) == 1


def test_a_pipe_that_nobody_reads_does_not_hold_up_the_start(tmp_path):
    os.mkfifo(tmp_path / "v.log")
    with pytest.raises(ConfigurationError, match="cannot be written: No such device or address"):
        open_log(str(tmp_path / "v.log"), violation_fields)


def test_a_pipe_with_a_slow_reader_is_waited_for(tmp_path):
    """By the log's own thread, which loses no line to a full pipe."""
    path = tmp_path / "v.log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = open_log(str(path), violation_fields)
    report(log, violation(7))
    eventually(lambda: log._file is not None)
    assert os.get_blocking(log._file.fileno())
    log.close()
    with open(reader, encoding="utf-8") as lines:
        assert [json.loads(line)["slot"] for line in lines] == [7]


def test_a_file_that_cannot_be_written_is_refused_at_start(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be written") as caught:
        open_log(str(tmp_path / "missing/v.log"), violation_fields)
    assert caught.value.setting == "log_file"
