"""Standard output that cannot be written: no traceback, one line, and an exit code that tells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LINES = ["settings", "metrics", "metrics --format json", "--help", "bench"]


def start(line: str, stdout: int | None) -> tuple[int, str]:
    """Exit code and standard error of the command with this standard output (None: closed)."""
    close = {"preexec_fn": lambda: os.close(1)} if stdout is None else {}
    # Buffered, as the interpreter is unless PYTHONUNBUFFERED says otherwise.
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KV_CANARY") and name != "PYTHONUNBUFFERED"
    }
    done = subprocess.run(
        [sys.executable, "-m", "canary_obs", *line.split()],
        env=clean, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **close,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("line", LINES)
def test_a_full_device_is_one_line(line: str) -> None:
    with Path("/dev/full").open("w") as full:
        code, err = start(line, full.fileno())
    assert (code, err) == (1, "error: the output cannot be written: No space left on device.\n")


def closed_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.parametrize("line", ["settings", "metrics"])
def test_a_reader_that_left_ends_the_command_as_it_ends_other_tools(line: str) -> None:
    write = closed_pipe()
    code, err = start(line, write)
    os.close(write)
    assert (code, err) == (-signal.SIGPIPE, "")


def test_a_reader_that_left_during_help_is_no_error_message() -> None:
    write = closed_pipe()
    code, err = start("--help", write)
    os.close(write)
    assert code != 0
    assert err == ""


def test_a_closed_output_is_one_line() -> None:
    assert start("settings", None) == (1, "error: the output cannot be written: Bad file descriptor.\n")
