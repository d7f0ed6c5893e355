"""Exit codes of the commands that ask a service, for CI gates and scripts (docs/cli.md)."""

from __future__ import annotations

from enum import IntEnum
from typing import NoReturn

import typer

from canary_obs.errors import CanaryError
from canary_obs.vocabulary import State, SweepStatus


class ExitCode(IntEnum):
    """0 is a promise: all is well, and was looked at."""

    OK = 0
    FAILED = 1  # the output cannot be written, or a service refused what was asked
    REFUSED = 2  # the command line or a setting makes no sense
    VIOLATED = 3
    BLIND = 4  # blind, off, not checked to the end, or no service answers
    DEGRADED = 5


_OF_STATE = {
    State.OK: ExitCode.OK,
    State.OFF: ExitCode.BLIND,
    State.DEGRADED: ExitCode.DEGRADED,
    State.BLIND: ExitCode.BLIND,
    State.VIOLATED: ExitCode.VIOLATED,
}
_OF_SWEEP = {
    SweepStatus.PASSED: ExitCode.OK,
    SweepStatus.VIOLATED: ExitCode.VIOLATED,
}


class CommandFailed(CanaryError):
    """A command ends with this code; the text is its line on standard error."""

    def __init__(self, code: ExitCode, text: str) -> None:
        self.code = code
        super().__init__(text)


def code_of_state(state: str) -> ExitCode:
    """The code for a state; one that this release does not know is not `ok`."""
    try:
        return _OF_STATE[State(state)]
    except ValueError:
        return ExitCode.BLIND


def code_of_sweep(status: str) -> ExitCode:
    """The code for a sweep that has ended."""
    try:
        return _OF_SWEEP.get(SweepStatus(status), ExitCode.BLIND)
    except ValueError:
        return ExitCode.BLIND


def end_with(code: ExitCode) -> NoReturn:
    """End the command, whose output is complete."""
    raise typer.Exit(code)
