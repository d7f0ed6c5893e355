"""The service as a child process: ready when it answers, stopped with its parent."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from canary_obs.config import CanaryConfig
from canary_obs.engines.toolkit.service_process import ServiceProcess, free_port, start_service
from canary_obs.errors import ConfigurationError

_PARENT = """
import os, sys
from canary_obs.engines.toolkit.service_process import ServiceProcess
service = ServiceProcess.start(sys.argv[1], int(sys.argv[2]))
os.write(1, str(service._process.pid).encode())
os._exit(0)
"""


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def first(tmp_path: Path) -> Iterator[tuple[ServiceProcess, int]]:
    port = free_port()
    service = ServiceProcess.start(f"ipc://{tmp_path}/first", port)
    yield service, port
    service.stop()


def test_two_services_run_on_ports_of_their_own(first: tuple[ServiceProcess, int], tmp_path: Path) -> None:
    second = ServiceProcess.start(f"ipc://{tmp_path}/second", free_port())
    second.stop()
    assert second.url != first[0].url


def test_the_current_directory_is_not_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ctypes", "canary_obs", "zmq"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'imported')!r}, 'w')\nraise SystemExit(3)\n"
        )
    monkeypatch.chdir(tmp_path)
    ServiceProcess.start(f"ipc://{tmp_path}/service", free_port()).stop()
    assert not (tmp_path / "imported").exists()


def test_a_port_that_another_service_has_is_refused(
    first: tuple[ServiceProcess, int], tmp_path: Path
) -> None:
    """The answer of the other service does not count as an answer of the new one."""
    with pytest.raises(ConfigurationError, match="a service answers there already"):
        ServiceProcess.start(f"ipc://{tmp_path}/second", first[1])


def test_a_service_that_refuses_to_start_is_an_error(
    first: tuple[ServiceProcess, int], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="ended with exit code"):
        ServiceProcess.start(f"ipc://{tmp_path}/first", free_port())


def test_stop_is_idempotent(first: tuple[ServiceProcess, int]) -> None:
    service, _ = first
    service.stop()
    service.stop()


def test_the_service_ends_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PARENT, f"ipc://{tmp_path}/service", str(free_port())]
    pid = int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    deadline = time.monotonic() + 30
    while running(pid):
        assert time.monotonic() < deadline, "the service outlived its parent"
        time.sleep(0.05)


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
