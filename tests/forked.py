"""Python programs in forks of a process that has imported what they need: a start of their own takes seconds.

That process is multiprocessing's server of forks, one of each process that runs tests. It starts with the
first program, in the environment of that moment; each program has the environment that it is given.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from tempfile import TemporaryFile
from typing import IO, Any

CONTEXT = multiprocessing.get_context("forkserver")

# Of tests of the reference engine and of the service; the compiled operations take seconds.
CONTEXT.set_forkserver_preload(
    [
        "canary_obs.cli",
        "canary_obs.serve",
        "canary_obs.demo.reference",
        "uvicorn.lifespan.on",
        "uvicorn.loops.auto",
        "uvicorn.protocols.http.auto",
        "tests.reference_engine.disaggregated",
        *(f"canary_kernels.{operation}.cpu" for operation in ("verify", "write", "fingerprint", "digest")),
    ]
)


class Forked:
    """`python -m MODULE ARGUMENTS`, as a subprocess.Popen; it ends with this process at the latest."""

    def __init__(
        self, module: str, *arguments: str, env: Mapping[str, str], files: Sequence[IO[Any]],
        stdin: IO[Any] | None = None, session: bool = False,
    ) -> None:  # fmt: skip
        """`files`: its standard output and, if it is another one, standard error. May be closed afterwards.

        `session`: one of its own, which what it starts belongs to.
        """
        numbers = [file.fileno() for file in (files[0], files[-1], *([stdin] if stdin else []))]
        given = module, arguments, dict(env), os.getcwd(), _Descriptors(numbers), session
        self._process = CONTEXT.Process(target=_run, args=given, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        """Exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(seconds)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self._process.name, seconds or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def run(
    module: str, *arguments: str, env: Mapping[str, str], seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with captured output. Raises subprocess.TimeoutExpired."""
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        process = Forked(module, *arguments, env=env, files=[output, errors])
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
        said = [file.read() for file in (output, errors) if file.seek(0) == 0]
    return subprocess.CompletedProcess([module, *arguments], code, *said)


class _WithEnvironment(ForkServerProcess):
    """A process with the environment in which it was made, as a spawned one has it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        _set_environment(self._environment)
        super().run()


class Context(ForkServerContext):
    """For a program that takes a context of multiprocessing, instead of one that spawns."""

    Process = _WithEnvironment  # type: ignore[assignment]


class _Descriptors:
    """Open files of this process, and of the fork that this is handed to."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)

    def __getstate__(self) -> list[Any]:
        return [DupFd(number) for number in self.numbers]

    def __setstate__(self, copies: list[Any]) -> None:
        self.numbers = [copy.detach() for copy in copies]


def _run(
    module: str, arguments: tuple[str, ...], environment: dict[str, str], folder: str, files: _Descriptors,
    session: bool,
) -> None:  # fmt: skip
    if session:
        os.setsid()
    for descriptor, number in zip((1, 2, 0), files.numbers, strict=False):
        os.dup2(number, descriptor)
        os.close(number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    _set_environment(environment)
    os.chdir(folder)
    sys.argv = [module, *arguments]
    multiprocessing.current_process().daemon = False  # those that it starts end with it
    os._exit(_exit_code(module))


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _exit_code(module: str) -> int:
    """Of a program that runs to its end, as Python itself ends one."""
    code: Any = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - printed, as Python does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code if isinstance(code, int) else int(bool(code))
