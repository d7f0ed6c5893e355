"""The service as a child process of the process that runs the engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from canary_obs.config import IN_PROCESS, CanaryConfig, ServiceConfig, load
from canary_obs.errors import ConfigurationError

_START_SECONDS = 30.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.1
# `python -m canary_obs` under PR_SET_PDEATHSIG (1): the kernel terminates it when the thread that started it
# ends, so the service does not outlive an engine that was killed.
_CHILD = (
    "import ctypes, runpy, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "runpy.run_module('canary_obs', run_name='__main__', alter_sys=True)"
)


def start_service(config: CanaryConfig) -> subprocess.Popen[bytes] | None:
    """Start the service where `KV_CANARY_SERVE=auto` asks for it (rank 0 only); None elsewhere.

    Does not wait for it. A service that cannot start (port or endpoint taken) reports that on standard error.
    """
    if config.serve != "auto" or config.rank != 0 or config.endpoint == IN_PROCESS:
        return None
    return _spawn(config.endpoint)


def stop_service(process: subprocess.Popen[bytes]) -> None:
    """Terminate the service, kill it when it has not ended after 10 seconds; idempotent."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class ServiceProcess:
    """A child service that has answered; `url` is its HTTP address."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._process, self.url = process, url

    @classmethod
    def start(cls, endpoint: str, port: int | None = None) -> ServiceProcess:
        """Start the service and wait until it answers; without `port` it is KV_CANARY_PORT's.

        Raises ConfigurationError when the port is taken or the service does not start.
        """
        given = {"endpoint": endpoint} | ({} if port is None else {"port": port})
        config = load(ServiceConfig, overrides=given)
        url = f"http://{config.host}:{config.port}"
        if _answers(url):
            raise ConfigurationError(
                "--serve", url, "a service answers there already", "Stop it, or choose another port."
            )
        process = _spawn(endpoint, config.port)
        try:
            _wait_until_ready(process, url)
        except BaseException:
            stop_service(process)
            raise
        return cls(process, url)

    def stop(self) -> None:
        """Terminate it, kill it when it does not end; idempotent."""
        stop_service(self._process)


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _spawn(endpoint: str, port: int | None = None) -> subprocess.Popen[bytes]:
    # -P: what lies in the current directory must not be imported in place of a library.
    command = [sys.executable, "-P", "-c", _CHILD, "serve", "--endpoint", endpoint]
    if port is not None:
        command += ["--port", str(port)]
    # Thread binding and preloaded libraries were set up for the engine, not for the service.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OMP_") and name != "LD_PRELOAD"
    }
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(url):
        if process.poll() is not None:
            raise ConfigurationError(
                "--serve", url, f"the service ended with exit code {process.returncode}",
                "Its own message is above.",
            )  # fmt: skip
        if time.monotonic() > deadline:
            raise ConfigurationError(
                "--serve", url, f"no answer within {_START_SECONDS:.0f} s", "Run canary-obs serve alone."
            )
        time.sleep(_POLL_SECONDS)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
