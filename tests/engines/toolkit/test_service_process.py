"""The service as a child process: ready when it answers, stopped with its parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from canary_obs.config import CanaryConfig
from canary_obs.engines.toolkit import service_process
from canary_obs.engines.toolkit.service_process import (
    ServiceProcess,
    SupervisedService,
    _answers,
    _spawn,
    free_port,
    start_service,
)
from canary_obs.errors import ConfigurationError

_PARENT = """
import os, sys
from canary_obs.engines.toolkit.service_process import ServiceProcess
service = ServiceProcess.start(sys.argv[1], int(sys.argv[2]))
os.write(1, b"%d\\n" % service._process.pid)
os.kill(os.getpid(), int(sys.argv[3]))
"""
_SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("given", "chosen"),
    [("32768 60999", range(10_000, 32_768)), ("1024 65535", range(1024, 65_536)), ("", range(1, 65_536))],
)
def test_a_free_port_is_none_that_the_system_gives_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, chosen: range
) -> None:
    """Where there are such ports. Another process would have it before the one that it was chosen for."""
    path = tmp_path / "range"
    path.write_text(given)
    monkeypatch.setattr(service_process, "_GIVEN_PORTS", path)
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10
    assert ports <= set(chosen)


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken, socket.socket() as other:
        for each in (taken, other):
            each.bind(("127.0.0.1", free_port()))
        used = [each.getsockname()[1] for each in (taken, other)]
        drawn = SimpleNamespace(sample=lambda *_: used)
        monkeypatch.setattr(service_process.random, "SystemRandom", lambda: drawn)
        assert free_port() not in used


@pytest.fixture
def first(tmp_path: Path) -> Iterator[tuple[ServiceProcess, int]]:
    port = free_port()
    service = ServiceProcess.start(f"ipc://{tmp_path}/first", port)
    yield service, port
    service.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceProcess, str, int]]:
    """A service that no test ends, its endpoint and its port."""
    endpoint, port = f"ipc://{tmp_path_factory.mktemp('shared')}/service", free_port()
    service = ServiceProcess.start(endpoint, port)
    yield service, endpoint, port
    service.stop()


def test_two_services_run_on_ports_of_their_own(
    shared: tuple[ServiceProcess, str, int], tmp_path: Path
) -> None:
    second = ServiceProcess.start(f"ipc://{tmp_path}/second", free_port())
    for _ in range(2):  # to stop is idempotent
        second.stop()
    assert second.url != shared[0].url


def test_the_current_directory_is_not_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ctypes", "canary_obs", "zmq"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'imported')!r}, 'w')\nraise SystemExit(3)\n"
        )
    monkeypatch.chdir(tmp_path)
    ServiceProcess.start(f"ipc://{tmp_path}/service", free_port()).stop()
    assert not (tmp_path / "imported").exists()


def test_a_port_that_another_service_has_is_refused(
    shared: tuple[ServiceProcess, str, int], tmp_path: Path
) -> None:
    """The answer of the other service does not count as an answer of the new one."""
    with pytest.raises(ConfigurationError, match="a service answers there already"):
        ServiceProcess.start(f"ipc://{tmp_path}/second", shared[2])


def test_a_service_that_refuses_to_start_is_an_error(shared: tuple[ServiceProcess, str, int]) -> None:
    with pytest.raises(ConfigurationError, match="ended with exit code"):
        ServiceProcess.start(shared[1], free_port())


def eventually(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_service_ends_with_its_parent(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", _PARENT, f"ipc://{tmp_path}/service", str(free_port()), str(int(number))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())  # not to its end: the service has the pipe as well
        try:
            assert parent.wait(10.0) == -number
            # It asks five times a second whether there is one; on a busy machine it is asked late.
            eventually(lambda: not running(pid), 20.0)
        finally:
            if running(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_service_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    started: list[ServiceProcess] = []

    def start() -> None:
        started.append(ServiceProcess.start(f"ipc://{tmp_path}/service", free_port()))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            started[0]._process.wait(1.0)
        assert _answers(started[0].url)
    finally:
        started[0].stop()


@pytest.mark.slow
def test_a_new_engines_service_takes_over_when_the_old_one_ends(
    first: tuple[ServiceProcess, int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    old, port = first
    new = _spawn(f"ipc://{tmp_path}/first", port, wait_seconds=60.0)
    said = ""

    def waits() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "waits up to 60 s to take over" in said

    try:
        eventually(waits, 20.0)
        old.stop()
        eventually(lambda: _answers(old.url), 3.0)
        assert new.poll() is None
        assert (said + capfd.readouterr().err).count("to take over") == 1
    finally:
        new.terminate()
        new.wait()


@pytest.mark.slow
def test_a_service_that_waits_gives_up_at_its_time_out(
    first: tuple[ServiceProcess, int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _spawn(f"ipc://{tmp_path}/first", free_port(), wait_seconds=0.6).wait(30) != 0
    assert f"process {first[0]._process.pid} is listening there" in capfd.readouterr().err.replace("\n", " ")


def test_a_service_that_ended_is_started_again_until_it_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    service = SupervisedService(lambda: subprocess.Popen(_SLEEPS), first_delay=0.01)
    first = service.process
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: service.process is not first, 5.0)
    assert service.restarts == 1
    assert running(service.process.pid)
    assert f"(process {first.pid}) ended with exit code -9; restart 1 in 0.01 s" in caplog.text
    service.stop()
    service.stop()
    assert not running(service.process.pid)
    assert service.restarts == 1


def test_restarts_come_ever_later_and_a_failed_one_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    started = []

    def start() -> subprocess.Popen[bytes]:
        started.append(1)
        if len(started) == 2:
            raise OSError(12, "Cannot allocate memory")
        return subprocess.Popen([sys.executable, "-S", "-c", ""])

    service = SupervisedService(start, first_delay=0.01)
    eventually(lambda: service.restarts >= 3, 10.0)
    service.stop()
    for expected in ("restart 1 in 0.01 s", "restart 2 in 0.02 s", "restart 3 in 0.04 s", "Cannot allocate"):
        assert expected in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"serve": "off", "endpoint": "ipc:///tmp/unused"},
        {"serve": "auto", "rank": 1, "endpoint": "ipc:///tmp/unused"},
        {"serve": "auto", "endpoint": "inproc"},
    ],
)
def test_an_engine_starts_no_service_unless_asked(settings: dict[str, object]) -> None:
    assert start_service(CanaryConfig(**settings)) is None
