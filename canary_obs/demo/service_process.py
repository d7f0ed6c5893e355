"""The service as a child process beside an engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from canary_obs.config import ServiceConfig, load
from canary_obs.errors import ConfigurationError

_START_SECONDS = 30.0
_STOP_SECONDS = 10.0


def free_port() -> int:
    """A TCP port of this host's that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServiceProcess:
    """`canary-obs serve`, started and stopped with the demo."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._process, self.url = process, url

    @classmethod
    def start(cls, endpoint: str, port: int | None) -> ServiceProcess:
        """Start it and wait until it answers. Raises ConfigurationError when it refuses to start."""
        given = {"endpoint": endpoint} | ({} if port is None else {"port": port})
        config = load(ServiceConfig, overrides=given)
        url = f"http://{config.host}:{config.port}"
        if _answers(url):
            raise ConfigurationError(
                "--serve", url, "a service answers there already", "Stop it, or choose another port."
            )
        command = [
            sys.executable,
            "-m",
            "canary_obs",
            "serve",
            "--endpoint",
            endpoint,
            "--port",
            str(config.port),
        ]
        process = subprocess.Popen(command, env=os.environ.copy())
        service = cls(process, url)
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(url):
            if process.poll() is not None:
                raise ConfigurationError(
                    "--serve", service.url, f"the service ended with exit code {process.returncode}",
                    "Its own message is above.",
                )  # fmt: skip
            if time.monotonic() > deadline:
                service.stop()
                raise ConfigurationError(
                    "--serve",
                    service.url,
                    f"no answer within {_START_SECONDS:.0f} s",
                    "Run canary-obs serve alone.",
                )
            time.sleep(0.1)
        return service

    def invitation(self) -> str:
        """What to try."""
        return (
            f"service at {self.url}\n"
            f"  curl {self.url}/metrics\n"
            f"  curl -X POST '{self.url}/canary/sweep?wait=true'\n"
            f"  curl {self.url}/canary/status\n"
            "Ctrl-C ends the demo."
        )

    def stop(self) -> None:
        """Ask it to end, insist after a while; idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
