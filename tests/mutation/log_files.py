"""Seeded defects of the log: its file's mode, what is opened as one, and its lines for people."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_LOG = "tests/telemetry/test_log.py::"

FILES = mutants(
    "canary_obs/telemetry/log.py",
    ("| os.O_NONBLOCK, 0o600)", "| os.O_NONBLOCK, 0o644)", _LOG + "test_a_new_file_is_for_its_owner_alone"),
    (", opener=_open_private", "", _LOG + "test_a_new_file_is_for_its_owner_alone"),
    (
        "    os.set_blocking(file, True)\n",
        "",
        _LOG + "test_a_pipe_with_a_slow_reader_is_waited_for",
    ),
)

_TEXT = "tests/telemetry/test_log_text.py::"

LINES = (
    *mutants(
        "canary_obs/telemetry/log_text.py",
        (
            "each if each.isprintable() else",
            "each if True else",
            _TEXT + "test_what_others_chose_cannot_move_the_cursor",
        ),
    ),
    *mutants(
        "canary_obs/telemetry/log.py",
        (
            'path == "" and sys.stderr is not None and sys.stderr.isatty()',
            "sys.stderr is not None",
            _TEXT + "test_a_file_has_json",
        ),
    ),
)

ALL = (*FILES, *LINES)
