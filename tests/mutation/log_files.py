"""Seeded defects of the log file's mode and of what is opened as one."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_LOG = "tests/telemetry/test_log.py::"

ALL = mutants(
    "canary_obs/telemetry/log.py",
    ("| os.O_NONBLOCK, 0o600)", "| os.O_NONBLOCK, 0o644)", _LOG + "test_a_new_file_is_for_its_owner_alone"),
    (", opener=_open_private", "", _LOG + "test_a_new_file_is_for_its_owner_alone"),
    (
        "    os.set_blocking(file, True)\n",
        "",
        _LOG + "test_a_pipe_with_a_slow_reader_is_waited_for",
    ),
)
