"""Servers of one user on one host: each has a number of its own, as real processes that die as they will."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from canary_obs.config import CanaryConfig
from canary_obs.engines.toolkit import server_number
from canary_obs.engines.toolkit.server_number import MOST_SERVERS, NumberTable, separate

_SERVER = """
import os, subprocess, sys
from pathlib import Path
from canary_obs.engines.toolkit.server_number import NumberTable
number = NumberTable(Path(sys.argv[1])).number_of(*sys.argv[2:])
sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleeps, stdout=subprocess.DEVNULL)
print(number, child.pid, flush=True)
sys.stdin.read()
"""


class Server:
    """A process with a number, and a child that outlives it."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(folder), *names],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        number, child = self.process.stdout.readline().split()
        self.number, self.child = int(number), int(child)

    def kill(self) -> None:
        self.process.kill()
        with self.process:
            pass


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    servers: list[Server] = []

    def begin(*names: str) -> Server:
        servers.append(Server(tmp_path / "folder", *names))
        return servers[-1]

    yield begin
    for server in servers:
        server.kill()
        os.kill(server.child, signal.SIGKILL)


def test_processes_of_one_server_share_a_number_and_another_has_the_next(start) -> None:
    first, second = start("one"), start("one")
    assert [first.number, second.number, start("two").number] == [1, 1, 2]
    first.kill()
    assert start("three").number == 3, "a process of the first server is still running"
    second.kill()
    assert start("three").number == 3, "what was claimed stays"
    assert start("four").number == 1


def test_a_killed_servers_number_is_free_though_its_child_lives(start, tmp_path: Path) -> None:
    start("one").kill()
    assert start("two").number == 1
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700


def test_parts_of_one_instance_are_numbered_by_themselves(start) -> None:
    assert start("one", "-replica0").number == 1
    assert start("two", "-replica1").number == 1
    assert start("three", "-replica0").number == 2


def test_a_process_keeps_its_number(tmp_path: Path) -> None:
    table, other = NumberTable(tmp_path), NumberTable(tmp_path)
    assert [table.number_of("one"), table.number_of("one"), other.number_of("two")] == [1, 1, 2]


def test_numbers_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_number, "MOST_SERVERS", 2)
    table = NumberTable(tmp_path)
    assert [table.number_of("one"), table.number_of("two")] == [1, 2]
    with pytest.raises(OSError, match="servers of this user are running"):
        table.number_of("three")
    assert MOST_SERVERS > 2


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the default endpoint, where another server has number 1."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(server_number, "_numbers", {})
    NumberTable(tmp_path / "canary_obs").number_of("other")
    return tmp_path / "canary_obs"


def test_the_first_server_keeps_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(server_number, "_numbers", {})
    config = CanaryConfig(serve="auto")
    assert separate(config, "this") == (config, None)
    assert caplog.messages == []


def test_the_second_has_an_instance_a_socket_and_a_port_of_its_own(
    second: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, port = separate(CanaryConfig(serve="auto"), "this")
    assert (config.instance, config.endpoint, port) == ("default-2", f"ipc://{second}/service-2.sock", 9465)
    (line,) = caplog.messages
    assert "instance default-2 " in line
    assert line.endswith("service-2.sock, whose service has port 9465.")


def test_with_one_service_for_both_only_the_instance_differs(second: Path) -> None:
    config, port = separate(CanaryConfig(), "this")
    assert (config.instance, config.endpoint, port) == ("default-2", f"ipc://{second}/service.sock", None)


@pytest.mark.parametrize(
    ("given", "port", "expected"),
    [
        ({"instance": "mine"}, None, ("mine", "service.sock", None)),
        ({"endpoint": "inproc"}, None, ("default", "inproc", None)),
        ({"endpoint": "ipc:///elsewhere/a.sock"}, None, ("default-2", "a.sock", None)),
        ({}, "9999", ("default-2", "service-2.sock", None)),
        ({}, "none", ("default-2", "service-2.sock", None)),  # the service refuses it itself
    ],
)
def test_what_was_set_stays(
    second: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], port: str | None, expected: object
) -> None:
    if port is not None:
        monkeypatch.setenv("KV_CANARY_PORT", port)
    config, chosen = separate(CanaryConfig(serve="auto", **given), "this")
    assert (config.instance, config.endpoint.rpartition("/")[2], chosen) == expected


def test_a_folder_that_cannot_be_used_stops_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(server_number, "_numbers", {})
    (tmp_path / "canary_obs").write_text("a file")
    with caplog.at_level(logging.WARNING):
        config = CanaryConfig()
        assert separate(config, "this") == (config, None)
    assert "KV_CANARY_INSTANCE" in caplog.text


def test_a_process_that_holds_the_guard_for_ever_stops_no_engine(
    second: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_number, "_WAIT_SECONDS", 0.05)
    with (second / "servers.lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        config = CanaryConfig()
        assert separate(config, "this") == (config, None)
    assert "servers.lock" in caplog.text
