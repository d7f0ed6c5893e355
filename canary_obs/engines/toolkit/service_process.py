"""The service as a child process of the process that runs the engine."""

from __future__ import annotations

import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from canary_obs.config import IN_PROCESS, CanaryConfig, ServiceConfig, load
from canary_obs.errors import ConfigurationError

_START_SECONDS = 30.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.1
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # first and last that the system gives away
_LOWEST_PORT = 10_000  # of those that are chosen; below are those of well-known services
# So long a service waits for the one of an engine that ended just before, or of another engine, to end.
_TAKE_OVER_SECONDS = 300.0
# Between the end of a service and the start of the next one; doubled until a service has lasted.
_FIRST_DELAY_SECONDS, _LAST_DELAY_SECONDS, _LASTED_SECONDS = 1.0, 60.0, 60.0
# `python -m canary_obs` that ends when its parent has ended, however. (The kernel's own signal for that,
# PR_SET_PDEATHSIG, comes already when the thread that started the child ends.)
_CHILD = """
import os, runpy, signal, threading, time
def watch():
    while os.getppid() == {parent}:
        time.sleep(0.2)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
threading.Thread(target=watch, name="canary-parent", daemon=True).start()
runpy.run_module("canary_obs", run_name="__main__", alter_sys=True)
"""

log = logging.getLogger("canary_obs")


def start_service(config: CanaryConfig, port: int | None = None) -> SupervisedService | None:
    """Start the service where `KV_CANARY_SERVE=auto` asks for it (rank 0 only); None elsewhere.

    `port`: None = KV_CANARY_PORT's. Does not wait for it. A service that cannot start reports that on its
    standard error and is started again.
    """
    if config.serve != "auto" or config.rank != 0 or config.endpoint == IN_PROCESS:
        return None
    return SupervisedService(lambda: _spawn(config.endpoint, port, wait_seconds=_TAKE_OVER_SECONDS))


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


class SupervisedService:
    """A child service that a thread starts again, with back-off, each time it ends; until `stop`."""

    def __init__(
        self, start: Callable[[], subprocess.Popen[bytes]], first_delay: float = _FIRST_DELAY_SECONDS
    ) -> None:
        self._start, self._first_delay = start, first_delay
        self._stop, self._lock = threading.Event(), threading.Lock()
        self.process = start()
        self.restarts = 0
        self._thread = threading.Thread(target=self._watch, name="canary-service-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Terminate the service, kill it when it does not end; none is started afterwards. Idempotent."""
        with self._lock:
            self._stop.set()
        stop_service(self.process)
        self._thread.join()

    def _watch(self) -> None:
        delay = self._first_delay
        while True:
            started = time.monotonic()
            code = self.process.wait()
            if time.monotonic() - started >= _LASTED_SECONDS:
                delay = self._first_delay
            if self._stop.is_set():
                return
            log.warning(
                "canary_obs: the service (process %d) ended with exit code %d; restart %d in %g s",
                self.process.pid, code, self.restarts + 1, delay,
            )  # fmt: skip
            if self._stop.wait(delay):
                return
            delay = min(2 * delay, _LAST_DELAY_SECONDS)
            self._restart()

    def _restart(self) -> None:
        with self._lock:
            if self._stop.is_set():
                return
            self.restarts += 1
            try:
                self.process = self._start()
            except OSError as error:  # no memory or no process left: tried again
                log.warning("canary_obs: the service could not be started: %s", error)


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
    """A TCP port of the loopback interface that is free now, and that the system gives to nobody.

    An engine takes dozens of the system's as it starts, before it comes to the one that was chosen for it.
    Where nearly all ports are the system's, it is one of these.
    """
    first = _first_given()
    draw = random.SystemRandom()  # forks of one process must not draw the same
    for port in draw.sample(range(_LOWEST_PORT, first), 20) if first > 2 * _LOWEST_PORT else ():
        with suppress(OSError):
            return _bound(port)
    return _bound(0)


def _first_given() -> int:
    try:
        return int(_GIVEN_PORTS.read_text("utf-8").split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return 0


def _bound(port: int) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        found: int = probe.getsockname()[1]
        return found


def _spawn(endpoint: str, port: int | None = None, wait_seconds: float = 0.0) -> subprocess.Popen[bytes]:
    # -P: what lies in the current directory must not be imported in place of a library.
    code = _CHILD.format(parent=os.getpid())
    command = [
        sys.executable,
        "-P",
        "-c",
        code,
        "serve",
        "--endpoint",
        endpoint,
        "--wait",
        f"{wait_seconds:g}",
    ]
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
