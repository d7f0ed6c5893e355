"""`canary-obs` in forks of a process that has imported what it needs: a start of its own takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")

# Loaded once and not by every fork; the compiled operations take seconds.
_PRELOADED = [
    "canary_obs.cli",
    "canary_obs.serve",
    "canary_obs.demo.reference",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "tests.reference_engine.disaggregated",
    *(f"canary_kernels.{operation}.cpu" for operation in ("verify", "write", "fingerprint", "digest")),
]
CONTEXT.set_forkserver_preload(_PRELOADED)


class Forked:
    """A command of canary-obs; it ends with this process at the latest. As a subprocess.Popen."""

    def __init__(self, arguments: tuple[str, ...], environment: Mapping[str, str], log: Path) -> None:
        self._process = CONTEXT.Process(target=_run, args=(arguments, environment, log), daemon=True)
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
            raise subprocess.TimeoutExpired("canary-obs", seconds or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(arguments: tuple[str, ...], environment: Mapping[str, str], log: Path) -> None:
    from canary_obs.cli import main

    with log.open("wb") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["canary-obs", *arguments]
    main()
