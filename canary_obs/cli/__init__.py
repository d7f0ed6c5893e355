"""The command `canary-obs`. Refusals are one line on standard error and exit code 2."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, TextIO

import typer

from canary_obs import __version__
from canary_obs.cli.bench import bench
from canary_obs.cli.bench_sglang import sglang_gpu
from canary_obs.cli.bench_vllm_load import vllm_host, vllm_load
from canary_obs.cli.completion import completion
from canary_obs.cli.demo import demo
from canary_obs.cli.doctor import doctor
from canary_obs.cli.exit_codes import CommandFailed
from canary_obs.cli.export import export
from canary_obs.cli.fleet import fleet
from canary_obs.cli.heal import heal
from canary_obs.cli.incident import ack, incident, incidents
from canary_obs.cli.keys import keys
from canary_obs.cli.metrics import metrics
from canary_obs.cli.missing import explained
from canary_obs.cli.output import write_out
from canary_obs.cli.ranks import drill, pause, resume
from canary_obs.cli.serve import serve
from canary_obs.cli.settings import settings
from canary_obs.cli.status import status, watch
from canary_obs.cli.sweeps import sweep, sweeps
from canary_obs.cli.tainted import tainted
from canary_obs.cli.tour import tour
from canary_obs.cli.violations import violations
from canary_obs.config import PREFIX, SETTING_NAMES
from canary_obs.errors import ConfigurationError, KVCacheViolation, UnsupportedEngine

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
_COMMANDS = (
    status, watch, sweep, violations, incidents, tainted, ack, pause, resume, heal, drill, doctor,
    tour, demo, serve, settings, metrics, keys, export, completion,
)  # fmt: skip
for command in _COMMANDS:
    app.command()(command)
app.add_typer(sweeps, name="sweeps")
bench.command("sglang-gpu")(sglang_gpu)
bench.command("vllm-load")(vllm_load)
bench.command("vllm-host")(vllm_host)
app.add_typer(bench, name="bench")
app.add_typer(incident, name="incident")
app.add_typer(fleet, name="fleet")


def _print_version(wanted: bool) -> None:
    if wanted:
        write_out(f"canary-obs {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself."""


# Typer has a copy of click of its own, and exports of its exceptions BadParameter: this is its base class.
_Refusal: Any = typer.BadParameter.__mro__[2]
_WRITING_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main() -> None:
    """Run the command line."""
    try:
        code = run(sys.argv[1:])
    except BrokenPipeError:
        # As tools end that leave SIGPIPE alone. Python ignores it, and an engine in this process must.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
        code = 1
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """The exit code of this command line. Raises BrokenPipeError when nobody reads the output any more."""
    try:
        return _invoke(list(arguments))
    except KVCacheViolation as violation:
        _to_stderr(f"KVCacheViolation: {violation}")
        return 1
    except CommandFailed as failed:
        _to_stderr(f"error: {failed}")
        return failed.code
    except ModuleNotFoundError as error:
        if (text := explained(error)) is None:
            raise
        _to_stderr(f"error: {text}")
        return 2
    except (ConfigurationError, UnsupportedEngine) as error:
        _to_stderr(f"error: {_named_as_given(error)}")
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in _WRITING_FAILED or error.filename is not None:
            raise
        _drop(sys.stdout)
        _to_stderr(f"error: the output cannot be written: {error.strerror}.")
        return 1


@cache
def _command() -> Any:
    """The program with all of its commands; Typer reads every signature to build it."""
    return typer.main.get_command(app)


def _invoke(arguments: list[str]) -> int:
    command = _command()
    try:
        with command.make_context("canary-obs", arguments) as context:
            command.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()
    except typer.Exit as ended:  # after a help page
        return ended.exit_code
    except _Refusal as refusal:
        if type(refusal).__name__ == "NoArgsIsHelpError":
            refusal.show()  # the help page, or nothing where rich has printed it
        else:
            _to_stderr(f"error: {_in_one_line(refusal, arguments)}")
        return 2
    return 0


def _in_one_line(refusal: Any, arguments: Sequence[str]) -> str:
    """What is wrong with the command line, and where its usage is."""
    words, command = ["canary-obs"], _command()
    for word in arguments:
        if word not in (commands := getattr(command, "commands", {})):
            break
        command = commands[word]
        words.append(word)
    remedy = f"Usage: '{' '.join(words)} --help'."
    for name in getattr(getattr(refusal, "param", None), "opts", ()):
        if given := _given(name, arguments):
            rule = refusal.message.rstrip(".")
            return str(ConfigurationError(name, ", ".join(given), rule, remedy))
    return f"{refusal.format_message().rstrip('.')}. {remedy}"


def _given(option: str, arguments: Sequence[str]) -> list[str]:
    """The values that the command line has for an option."""
    apart = [after for argument, after in pairwise(arguments) if argument == option]
    prefix = f"{option}="
    return apart + [text.removeprefix(prefix) for text in arguments if text.startswith(prefix)]


def _to_stderr(line: str) -> None:
    """Write one line to standard error, if it can be written."""
    with suppress(OSError, ValueError, AttributeError):  # full, closed, or none at all
        sys.stderr.write(" ".join(line.splitlines()) + "\n")
        sys.stderr.flush()


def _drop(stream: TextIO | None) -> None:
    """Let what could not be written go: the interpreter would try again at its end, and fail."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _named_as_given(error: ConfigurationError | UnsupportedEngine) -> str:
    """The message; a setting that came from the environment is named by its variable."""
    if isinstance(error, ConfigurationError):
        variable = f"{PREFIX}{error.setting.upper()}"
        if error.setting in SETTING_NAMES and variable in os.environ:
            return str(ConfigurationError(variable, error.value, error.rule, error.remedy))
    return str(error)
