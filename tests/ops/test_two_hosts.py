"""Service here, engine on another host: a network namespace, with a cable (veth) to it."""

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

# A network per process, so that leftovers of an interrupted run do not collide.
NETWORK = f"10.203.{os.getpid() % 250}"
HERE, THERE = f"{NETWORK}.1", f"{NETWORK}.2"
EVERY_PROTOCOL = 3  # ETH_P_ALL
FAR = {"instance": "faraway"}


@dataclass(slots=True)
class Cable:
    """A namespace and the two ends of the cable to it; all is gone with the namespace."""

    namespace: str = f"canary{os.getpid()}"
    near: str = f"cnr{os.getpid()}"
    far: str = field(default="cnr-far")

    def lay(self) -> None:
        ip("netns", "add", self.namespace)
        ip("link", "add", self.near, "type", "veth", "peer", "name", self.far, "netns", self.namespace)
        ip("addr", "add", f"{HERE}/30", "dev", self.near)
        ip("link", "set", self.near, "up")
        for words in (("addr", "add", f"{THERE}/30", "dev", self.far), ("link", "set", self.far, "up")):
            ip("-n", self.namespace, *words)

    def cut(self) -> None:
        ip("-n", self.namespace, "link", "set", self.far, "down")

    def mend(self) -> None:
        ip("-n", self.namespace, "link", "set", self.far, "up")

    def remove(self) -> None:
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True, check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    if shutil.which("ip") is None:
        pytest.skip("ip is NOT INSTALLED: apt-get install iproute2")
    cable = Cable()
    try:
        cable.lay()
    except subprocess.CalledProcessError as error:
        cable.remove()
        pytest.skip(f"network namespaces are NOT ALLOWED here: {error.stderr.decode().strip()}")
    yield cable
    cable.remove()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[KeyKind, Path]:
    return make_keys(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture(scope="module")
def system(
    cable: Cable, keys: dict[KeyKind, Path], tmp_path_factory: pytest.TempPathFactory
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
    return f"tcp://{HERE}:{system.port + 1 if system.port < 65535 else system.port - 1}"


def start_engine(
    system: System, cable: Cable, secret: Path, service: Path, instance: str
) -> subprocess.Popen[bytes]:
    return system.start(
        "demo", "--shape", "tiny", "--endpoint", endpoint_of(system),
        within=("ip", "netns", "exec", cable.namespace),
        KV_CANARY_ENGINE_SECRET_KEY_FILE=str(secret), KV_CANARY_SERVICE_PUBLIC_KEY_FILE=str(service),
        KV_CANARY_INSTANCE=instance,
    )  # fmt: skip


def state_of(system: System, instance: str) -> str:
    ranks = system.get("/canary/status").json["ranks"]
    return next((rank["state"] for rank in ranks if rank["identity"]["instance"] == instance), "unknown")


def test_an_engine_on_another_host_is_seen_and_swept(
    system: System, cable: Cable, keys: dict[KeyKind, Path]
) -> None:
    start_engine(system, cable, keys[KeyKind.ENGINE_SECRET], keys[KeyKind.SERVICE_PUBLIC], "faraway")
    system.until(lambda: state_of(system, "faraway") == "ok")
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL)) as tap:
        tap.bind((cable.near, EVERY_PROTOCOL))
        answer = system.request("POST", "/canary/sweep?wait=true")
        frames = b"".join(tap.recv(65535) for _ in range(40))
    assert (answer.status, answer.json["status"]) == (200, "passed"), answer.body
    assert system.metric("kv_canary_slots_verified_total", **FAR) > 0
    # The captured frames are traffic with the service, and they are encrypted.
    assert socket.inet_aton(THERE) in frames
    assert b"faraway" not in frames
    unencrypted = wire.encode(snapshot(msgspec.structs.replace(identity(), instance="faraway"), 1))
    assert b"faraway" in unencrypted


def test_an_engine_serves_on_while_the_cable_is_cut(system: System, cable: Cable) -> None:
    before = system.metric("kv_canary_steps_total", **FAR)
    engine = psutil.Process(system.processes[1].pid)
    cable.cut()
    worked, clock = engine.cpu_times().user, time.monotonic()
    system.until(lambda: state_of(system, "faraway") == "blind")
    share = (engine.cpu_times().user - worked) / (time.monotonic() - clock)
    known = system.metric("kv_canary_steps_total", **FAR)
    cable.mend()
    system.until(lambda: state_of(system, "faraway") == "ok")
    after = system.metric("kv_canary_steps_total", **FAR)
    # The engine has gone on all the while (one that waits uses no processor), and its counts are not lost.
    assert share > 0.1
    assert before <= known < after
    assert system.metric("kv_canary_restarts_total", **FAR) == 0
    assert system.metric("kv_canary_violations_total", **FAR) == 0


def test_a_stranger_is_refused_until_its_key_is_listed(
    system: System, cable: Cable, keys: dict[KeyKind, Path], tmp_path: Path
) -> None:
    other = make_keys(tmp_path / "other")
    start_engine(system, cable, other[KeyKind.ENGINE_SECRET], keys[KeyKind.SERVICE_PUBLIC], "stranger")
    refused = "kv_canary_hub_handshakes_refused_total"
    system.until(lambda: (system.metric(refused, cause="unknown_key") or 0) > 0)
    assert state_of(system, "stranger") == "unknown"
    with keys[KeyKind.ENGINE_PUBLIC].open("a") as listed:
        listed.write(other[KeyKind.ENGINE_PUBLIC].read_text())
    system.until(lambda: state_of(system, "stranger") == "ok")
    assert state_of(system, "faraway") == "ok"
