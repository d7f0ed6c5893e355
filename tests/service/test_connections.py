"""Connections that send nothing, or too slowly, or are too many: others are served all the same."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from canary_obs.config import ServiceConfig
from canary_obs.engines.toolkit.service_process import free_port
from canary_obs.serve import ServiceThread
from canary_obs.service import connections
from canary_obs.transport.links import LocalLink, ZmqLink
from tests.service.fakes import eventually, hello, identity


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceThread]:
    monkeypatch.setattr("canary_obs.serve.most_connections", lambda: 8)
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)
    made = ServiceThread(ServiceConfig(endpoint=f"ipc://{tmp_path}/s.sock", port=0), link=LocalLink())
    yield made
    made.close()


def ends(client: socket.socket) -> bool:
    """Whether the service closes the connection within a test's patience."""
    client.settimeout(10.0)
    with contextlib.suppress(ConnectionResetError):
        while client.recv(4096):
            pass
    return True


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: loc"])
def test_a_request_that_does_not_come_ends_the_connection(service: ServiceThread, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", service.port)) as client:
        client.sendall(sent)
        began = time.monotonic()
        assert ends(client)
        assert time.monotonic() - began < 5.0


def test_a_connection_is_used_again_for_as_long_as_requests_come(service: ServiceThread) -> None:
    with httpx.Client(base_url=service.url) as client:
        for _ in range(4):
            assert client.get("/healthz").status_code == 200
            time.sleep(0.15)  # together longer than the limit for one request
        assert len(client._transport._pool.connections) == 1  # type: ignore[attr-defined]


def test_silent_connections_beyond_the_limit_make_room(service: ServiceThread, monkeypatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 60.0)
    with contextlib.ExitStack() as opened:
        silent = [
            opened.enter_context(socket.create_connection(("127.0.0.1", service.port))) for _ in range(30)
        ]
        for _ in range(3):
            assert httpx.get(f"{service.url}/healthz").status_code == 200
        assert ends(silent[0])


_SERVE = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
sys.argv[0] = "canary-obs"
runpy.run_module("canary_obs", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_thousand_silent_connections_leave_room_for_engines_and_scrapes(tmp_path: Path) -> None:
    """The real service with 1 024 open files, as many as most systems give by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    port, endpoint = free_port(), f"ipc://{tmp_path}/s.sock"
    url, said = f"http://127.0.0.1:{port}", tmp_path / "stderr"
    command = [sys.executable, "-c", _SERVE, "serve", "--endpoint", endpoint, "--port", str(port)]
    with said.open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env=os.environ)
    try:
        eventually(lambda: answers(url), 60.0)  # it starts next to other work
        with contextlib.ExitStack() as opened:
            for _ in range(1100):
                opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            for path in ("/healthz", "/metrics"):
                assert httpx.get(f"{url}{path}", timeout=5.0).status_code == 200
            link = ZmqLink(endpoint)
            assert link.send(hello(identity()))
            eventually(lambda: httpx.get(f"{url}/canary/status").json()["ranks"])
            link.close()
        assert process.poll() is None
        assert said.stat().st_size < 10_000
    finally:
        process.terminate()
        process.wait(10.0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/healthz").status_code == 200
    return False


def test_a_quarter_of_the_open_files_is_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for soft in (64, 1024, 65536, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        found[soft] = connections.most_connections()
    assert found == {64: 16, 1024: 768, 65536: 4096, resource.RLIM_INFINITY: 4096}
