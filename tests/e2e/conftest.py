"""`canary-obs serve` and `canary-obs demo` as processes, and an HTTP client of the service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from canary_obs.engines.toolkit.service_process import free_port
from tests.forked import Forked

_Process = subprocess.Popen[bytes] | Forked
# Beside other tests of real engines on two cores, a process has taken over a minute to start.
TIMEOUT_SECONDS = 150.0


@dataclass(slots=True)
class Response:
    status: int
    body: str
    content_type: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class System:
    """A service and its engines as processes under one service address."""

    folder: Path
    port: int
    token: str = ""
    processes: list[_Process] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.folder}/service.sock"

    def start(self, *arguments: str, within: tuple[str, ...] = (), **environ: str) -> _Process:
        """Run a canary-obs command in a process; `within` is a command prefix, such as `ip netns exec`."""
        settings = {"OMP_NUM_THREADS": "1", "KV_CANARY_TOKEN": self.token} | environ
        if not self.token:
            del settings["KV_CANARY_TOKEN"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KV_CANARY")}
        log = self.folder / f"{len(self.processes)}.log"
        with log.open("wb") as output:
            process: _Process
            if within:
                process = subprocess.Popen(
                    [*within, sys.executable, "-m", "canary_obs", *arguments],
                    env=clean | settings,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            else:
                process = Forked("canary_obs", *arguments, env=clean | settings, files=[output])
        self.processes.append(process)
        return process

    def serve(self, **environ: str) -> _Process:
        process = self.start("serve", "--port", str(self.port), "--endpoint", self.endpoint, **environ)
        self.until(lambda: self.get("/healthz").status == 200)
        return process

    def engine(self, *arguments: str) -> _Process:
        return self.start("demo", "--shape", "tiny", "--endpoint", self.endpoint, *arguments)

    def request(self, method: str, path: str, body: object = None, token: str | None = None) -> Response:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data, method=method)
        if data is not None:
            request.add_header("content-type", "application/json")
        if token or self.token:
            request.add_header("authorization", f"Bearer {token or self.token}")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return Response(answer.status, answer.read().decode(), answer.headers["content-type"])
        except urllib.error.HTTPError as error:
            return Response(error.code, error.read().decode(), error.headers["content-type"])
        except (urllib.error.URLError, ConnectionError):
            return Response(0, "", "")

    def get(self, path: str) -> Response:
        return self.request("GET", path)

    def metric(self, name: str, **labels: str) -> float | None:
        """Sum of the samples of a metric whose labels match; None when there is none."""
        found = [
            float(line.rsplit(" ", 1)[1])
            for line in self.get("/metrics").body.splitlines()
            if line.split("{")[0].split(" ")[0] == name
            and all(f'{label}="{value}"' in line for label, value in labels.items())
        ]
        return sum(found) if found else None

    def state(self) -> str:
        answer = self.get("/canary/status")
        return str(answer.json["state"]) if answer.status == 200 else f"http {answer.status}"

    def until(self, true: Callable[[], bool]) -> None:
        """Poll a condition of the outside world; the deadline is a failure, not a wait."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not true():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(
            path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("*.log"))
        )

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    system = System(tmp_path, free_port())
    yield system
    system.close()
