"""vLLM's OpenAI server and the canary's service as processes, for tests over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.forked import Forked

START_SECONDS = 240.0  # where other work uses the cores, too


def call(url: str, body: Any = None, method: str | None = None, timeout: float = 120.0) -> tuple[int, Any]:
    """Status and decoded answer; JSON where it is JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data=data, method=method, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


class Process:
    """A child in its own session; everything it started ends with it."""

    def __init__(
        self, command: list[str], environment: dict[str, str], log: Path, forked: bool = False
    ) -> None:
        """`forked`: the command is `[sys.executable, "-m", ...]`; see tests/forked.py."""
        self.log = log
        self._process: subprocess.Popen[bytes] | Forked
        with log.open("wb") as output:
            if forked:
                _, _, module, *arguments = command
                given = os.environ | environment
                self._process = Forked(module, *arguments, env=given, files=[output], session=True)
                return
            self._process = subprocess.Popen(
                command, env=os.environ | environment, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_for(self, url: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.alive, self.log.read_text()[-4000:]
            try:
                if call(url, timeout=2.0)[0] == 200:
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"{url} did not answer\n{self.log.read_text()[-4000:]}")

    def wait(self, seconds: float) -> int:
        """Exit status. Raises subprocess.TimeoutExpired."""
        return self._process.wait(seconds)

    def session(self) -> list[str]:
        """Names of the processes of its session that have not ended, its own included."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                name, _, fields = stat.read_text().rpartition(")")
                state, _, _, session = fields.split()[:4]
                if int(session) == self.pid and state != "Z":
                    found.append(name)
        return found

    def stop(self) -> None:
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def wait_until(condition: Any, seconds: float = 60.0) -> Any:
    """What a condition gives, once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.1)
    return found
