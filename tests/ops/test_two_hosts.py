"""Service on this host, engine in a network namespace that a veth pair connects."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import pytest

from canary_obs.engines.toolkit.service_process import free_port
from canary_obs.transport import wire
from canary_obs.transport.keys import KeyKind, make_keys
from tests.e2e.conftest import System
from tests.service.fakes import identity, snapshot

pytestmark = [pytest.mark.ops, pytest.mark.timeout(300)]

# One network per process, so that leftovers of an interrupted run do not collide.
NETWORK = f"10.203.{os.getpid() % 250}"
SERVICE_HOST, ENGINE_HOST = f"{NETWORK}.1", f"{NETWORK}.2"
ETH_P_ALL = 3
REMOTE = {"instance": "remote-engine"}


@dataclass(slots=True)
class RemoteHost:
    """A network namespace and the veth pair to it. Deleting the namespace deletes the pair."""

    namespace: str = f"canary{os.getpid()}"
    near: str = f"cnr{os.getpid()}"
    far: str = field(default="cnr-far")

    def create(self) -> None:
        ip("netns", "add", self.namespace)
        ip("link", "add", self.near, "type", "veth", "peer", "name", self.far, "netns", self.namespace)
        ip("addr", "add", f"{SERVICE_HOST}/30", "dev", self.near)
        ip("link", "set", self.near, "up")
        for arguments in (
            ("addr", "add", f"{ENGINE_HOST}/30", "dev", self.far),
            ("link", "set", self.far, "up"),
        ):
            ip("-n", self.namespace, *arguments)

    def disconnect(self) -> None:
        ip("-n", self.namespace, "link", "set", self.far, "down")

    def reconnect(self) -> None:
        ip("-n", self.namespace, "link", "set", self.far, "up")

    def remove(self) -> None:
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True, check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def remote_host() -> Iterator[RemoteHost]:
    if shutil.which("ip") is None:
        pytest.skip("ip is NOT INSTALLED: apt-get install iproute2")
    remote_host = RemoteHost()
    try:
        remote_host.create()
    except subprocess.CalledProcessError as error:
        remote_host.remove()
        pytest.skip(f"network namespaces are NOT ALLOWED here: {error.stderr.decode().strip()}")
    yield remote_host
    remote_host.remove()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[KeyKind, Path]:
    return make_keys(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture(scope="module")
def system(
    remote_host: RemoteHost, keys: dict[KeyKind, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    built = System(tmp_path_factory.mktemp("system"), free_port(), token="ops-token")
    built.start(
        "serve", "--port", str(built.port), "--endpoint", endpoint_of(built),
        KV_CANARY_SERVICE_SECRET_KEY_FILE=str(keys[KeyKind.SERVICE_SECRET]),
        KV_CANARY_ENGINE_PUBLIC_KEYS_FILE=str(keys[KeyKind.ENGINE_PUBLIC]),
    )  # fmt: skip
    built.until(lambda: built.get("/healthz").status == 200)
    yield built
    built.close()


def endpoint_of(system: System) -> str:
    return f"tcp://{SERVICE_HOST}:{system.port + 1 if system.port < 65535 else system.port - 1}"


def start_engine(
    system: System, remote_host: RemoteHost, secret: Path, service: Path, instance: str
) -> subprocess.Popen[bytes]:
    return system.start(
        "demo", "--shape", "tiny", "--endpoint", endpoint_of(system),
        within=("ip", "netns", "exec", remote_host.namespace),
        KV_CANARY_ENGINE_SECRET_KEY_FILE=str(secret), KV_CANARY_SERVICE_PUBLIC_KEY_FILE=str(service),
        KV_CANARY_INSTANCE=instance,
    )  # fmt: skip


def state_of(system: System, instance: str) -> str:
    ranks = system.get("/canary/status").json["ranks"]
    return next((rank["state"] for rank in ranks if rank["identity"]["instance"] == instance), "unknown")


def test_an_engine_on_another_host_is_seen_and_swept(
    system: System, remote_host: RemoteHost, keys: dict[KeyKind, Path]
) -> None:
    start_engine(
        system, remote_host, keys[KeyKind.ENGINE_SECRET], keys[KeyKind.SERVICE_PUBLIC], "remote-engine"
    )
    system.until(lambda: state_of(system, "remote-engine") == "ok")
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as tap:
        tap.bind((remote_host.near, ETH_P_ALL))
        answer = system.request("POST", "/canary/sweep?wait=true")
        frames = b"".join(tap.recv(65535) for _ in range(40))
    assert (answer.status, answer.json["status"]) == (200, "passed"), answer.body
    assert system.metric("kv_canary_slots_verified_total", **REMOTE) > 0
    # The captured frames are traffic between engine and service, and encrypted.
    assert socket.inet_aton(ENGINE_HOST) in frames
    assert b"remote-engine" not in frames
    unencrypted = wire.encode(snapshot(msgspec.structs.replace(identity(), instance="remote-engine"), 1))
    assert b"remote-engine" in unencrypted


def test_an_engine_keeps_running_while_disconnected(system: System, remote_host: RemoteHost) -> None:
    before = system.metric("kv_canary_steps_total", **REMOTE)
    engine = psutil.Process(system.processes[1].pid)
    remote_host.disconnect()
    cpu_before, started = engine.cpu_times().user, time.monotonic()
    system.until(lambda: state_of(system, "remote-engine") == "blind")
    cpu_share = (engine.cpu_times().user - cpu_before) / (time.monotonic() - started)
    known = system.metric("kv_canary_steps_total", **REMOTE)
    remote_host.reconnect()
    system.until(lambda: state_of(system, "remote-engine") == "ok")
    after = system.metric("kv_canary_steps_total", **REMOTE)
    # The engine kept running (a waiting one uses no CPU time), and its counts are not lost.
    assert cpu_share > 0.1
    assert before <= known < after
    assert system.metric("kv_canary_restarts_total", **REMOTE) == 0
    assert system.metric("kv_canary_violations_total", **REMOTE) == 0


def test_an_engine_is_refused_until_its_key_is_listed(
    system: System, remote_host: RemoteHost, keys: dict[KeyKind, Path], tmp_path: Path
) -> None:
    other = make_keys(tmp_path / "other")
    start_engine(system, remote_host, other[KeyKind.ENGINE_SECRET], keys[KeyKind.SERVICE_PUBLIC], "unlisted")
    refused = "kv_canary_hub_handshakes_refused_total"
    system.until(lambda: (system.metric(refused, cause="unknown_key") or 0) > 0)
    assert state_of(system, "unlisted") == "unknown"
    with keys[KeyKind.ENGINE_PUBLIC].open("a") as listed:
        listed.write(other[KeyKind.ENGINE_PUBLIC].read_text())
    system.until(lambda: state_of(system, "unlisted") == "ok")
    assert state_of(system, "remote-engine") == "ok"
