"""Lines for people where the log goes to a terminal; JSON elsewhere, unless a setting says otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import msgspec
import pytest

from canary_obs.telemetry.audit import audit_fields
from canary_obs.telemetry.log import open_log, violation_fields
from canary_obs.telemetry.log_text import line_for_people
from tests.service.fakes import violation
from tests.telemetry.test_log import PAUSE, report

VIOLATION = (
    "2023-11-14 22:13:20Z  VIOLATION 1  kv_data in slot 3 of full, position 7, request r1, found by the "
    "sweep check on fake/test rank 0: canary-obs incident show "
)
ORDER = "2023-11-14 22:13:20Z  done  POST /canary/pause by oncall from 10.0.0.7: 202 in 500 ms"


def written(path, log_format, **row):
    log = open_log(str(path), violation_fields, log_format=log_format)
    report(log, violation(3, position=7, **row))
    log.close()
    (line,) = path.read_text().splitlines()
    return line


def test_a_violation_is_one_sentence_and_the_next_command(tmp_path):
    assert written(tmp_path / "log", "text", request="r1").startswith(VIOLATION)
    assert "request" not in written(tmp_path / "other", "text", request="")


@pytest.mark.parametrize("log_format", ["auto", "json"])
def test_a_file_has_json(tmp_path, log_format):
    assert json.loads(written(tmp_path / "log", log_format))["event"] == "kv_cache_violation"


def test_a_write_request_is_one_line():
    assert line_for_people(audit_fields(PAUSE)) == ORDER
    refused = msgspec.structs.replace(PAUSE, token=None, status=401, location="/canary/sweeps/1")
    assert line_for_people(audit_fields(refused)).endswith(
        "refused  POST /canary/pause by somebody without a token from 10.0.0.7: 401 in 500 ms"
        ", /canary/sweeps/1"
    )
    assert "no answer" in line_for_people(audit_fields(msgspec.structs.replace(PAUSE, status=None)))


def test_what_others_chose_cannot_move_the_cursor():
    line = line_for_people(audit_fields(msgspec.structs.replace(PAUSE, path="/\x1b[2J\r\n\x9b1A")))
    assert line.isprintable()
    assert "/\\x1b[2J\\x0d\\x0a\\x9b1A" in line


SCRIPT = """if True:
    from canary_obs.telemetry.audit import audit_fields
    from canary_obs.telemetry.log import open_log
    from tests.telemetry.test_log import PAUSE
    log = open_log("", audit_fields)
    log((PAUSE,))
    log.close()
"""


def test_standard_error_has_text_on_a_terminal_and_json_in_a_pipe():
    command = [sys.executable, "-c", SCRIPT]
    piped = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
    assert json.loads(piped.stderr)["event"] == "order"
    ours, theirs = os.openpty()
    subprocess.run(command, stderr=theirs, check=True)
    os.close(theirs)
    with os.fdopen(ours, "rb") as terminal:
        assert terminal.read1(4096).decode().rstrip() == ORDER
