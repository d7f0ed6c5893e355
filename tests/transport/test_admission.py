"""TCP with keys: only engines with a listed key connect, and every refusal is counted."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import threading
import time

import msgspec
import psutil
import pytest
import zmq

from canary_obs.config import CanaryConfig, ServiceConfig
from canary_obs.errors import ConfigurationError
from canary_obs.hub.hub import Hub
from canary_obs.records import Pause, Violations
from canary_obs.transport import endpoint as endpoints
from canary_obs.transport.admission import Admission
from canary_obs.transport.keys import KeyKind, engine_keys, make_keys, service_keys
from canary_obs.transport.links import RECONNECT_SECONDS, ZmqLink
from canary_obs.transport.listener import ZmqListener
from canary_obs.transport.sender import open_link
from tests.service.fakes import eventually, hello, identity, snapshot, violation
from tests.transport.relay import Relay

ME = identity()


def host_address():
    """An address of this machine that is not loopback; loopback where there is none."""
    addresses = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family is socket.AF_INET and not entry.address.startswith("127.")
    ]
    return addresses[0] if addresses else "127.0.0.1"


def free_port():
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture
def made(tmp_path):
    return make_keys(tmp_path / "keys")


@pytest.fixture
def address():
    return f"tcp://{host_address()}:{free_port()}"


@pytest.fixture
def keys(made):
    return service_keys(
        ServiceConfig(
            service_secret_key_file=str(made[KeyKind.SERVICE_SECRET]),
            engine_public_keys_file=str(made[KeyKind.ENGINE_PUBLIC]),
        )
    )


@pytest.fixture
def config(made, address):
    return CanaryConfig(
        endpoint=address,
        engine_secret_key_file=str(made[KeyKind.ENGINE_SECRET]),
        service_public_key_file=str(made[KeyKind.SERVICE_PUBLIC]),
    )


@pytest.fixture
def hub():
    return Hub()


@pytest.fixture
def listener(address, hub, keys):
    listener = ZmqListener(f"tcp://*:{port_of(address)}", hub, keys)
    yield listener
    listener.close()


def port_of(address):
    return int(address.rpartition(":")[2])


def refused(hub, cause):
    return hub.counts().handshakes[cause]


def unlisted_key_line():
    return f"engine-public {other_engine()['public'].decode()}\n"


def other_engine():
    public, secret = zmq.curve_keypair()
    return {"public": public, "secret": secret}


def other_service():
    return {"service": zmq.curve_keypair()[0]}


def misconfigured_link(config, change):
    """A link with wrong keys or, on loopback, with none."""
    if change is None:
        return ZmqLink(f"tcp://127.0.0.1:{port_of(config.endpoint)}")
    return ZmqLink(config.endpoint, keys=dataclasses.replace(engine_keys(config), **change()))


def test_with_valid_keys_messages_and_commands_pass(listener, hub, config):
    link = open_link(config)
    assert all(link.send(message) for message in (hello(ME), snapshot(ME, 1)))
    eventually(lambda: hub.ranks() and hub.ranks()[0].snapshot)
    hub.pause()
    received = []
    eventually(lambda: received.extend(link.receive()) or Pause() in received)
    assert link.peer_age_seconds(time.monotonic()) < 10
    assert set(hub.counts().handshakes.values()) == {0}
    link.close()


@pytest.mark.parametrize(
    ("change", "causes"),
    # Without keys both ends detect the mismatch: the engine may disconnect before the service reports it.
    [
        (other_engine, ["unknown_key"]),
        (other_service, ["service_key"]),
        (None, ["mechanism", "broken_off"]),
    ],
    ids=["unknown_key", "wrong_service_key", "no_keys"],
)
def test_an_engine_with_wrong_keys_is_refused_and_delays_no_other(
    listener, hub, config, caplog, change, causes
):
    caplog.set_level(logging.WARNING, "canary_obs")
    wrong = misconfigured_link(config, change)
    wrong.send(hello(ME))
    eventually(lambda: any(refused(hub, cause) for cause in causes))
    assert wrong.receive() == []
    assert wrong.peer_age_seconds(time.monotonic()) is None
    # Another engine is not delayed by it, and only its messages arrive.
    right, other = open_link(config), identity(rank=5)
    right.send(snapshot(other, 1))
    eventually(hub.ranks)
    wrong.send(snapshot(ME, 1))
    right.send(snapshot(other, 2))
    eventually(lambda: hub.ranks()[0].snapshot.step == 2)
    assert [rank.identity for rank in hub.ranks()] == [other]
    assert hub.verdict()[0] == "ok"
    assert len([line for line in caplog.messages if "was refused" in line]) >= 1
    for link in (right, wrong):
        link.close()


def test_refusals_are_logged_once_a_minute_with_the_peer_and_no_secret(listener, hub, config, caplog):
    caplog.set_level(logging.WARNING, "canary_obs")
    keys = dataclasses.replace(engine_keys(config), **other_engine())
    links = [ZmqLink(config.endpoint, keys=keys) for _ in range(3)]
    eventually(lambda: refused(hub, "unknown_key") >= 3)
    (line,) = caplog.messages
    assert f"from {host_address()} with public key {keys.public.decode()} was refused" in line
    assert keys.secret.decode() not in line
    for link in links:
        link.close()


OLDER_PROTOCOLS = (
    b"\x01\x00" + b"\x03\x00hi",  # before version 2: a greeting of one empty frame
    b"\xff" + bytes(8) + b"\x7f" + b"\x01\x05" + b"\x00\x00" + b"\x00\x02hi",  # version 2, a DEALER
)


def test_peers_of_older_or_other_protocols_are_refused(listener, hub, config):
    for data in (*OLDER_PROTOCOLS, b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host_address(), port_of(config.endpoint)), timeout=10) as connection:
            connection.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
    link = open_link(config)
    link.send(hello(ME))
    eventually(hub.ranks)
    assert (hub.counts().undecodable, sum(hub.counts().messages.values())) == (0, 1)
    link.close()


@pytest.mark.parametrize("data", OLDER_PROTOCOLS)
def test_without_keys_older_protocols_reach_the_decoder(data):
    hub, port = Hub(), free_port()
    listener = ZmqListener(f"tcp://127.0.0.1:{port}", hub)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(data)
        eventually(lambda: hub.counts().undecodable)
    listener.close()


def test_a_disconnect_during_the_handshake_is_counted(listener, hub, config):
    socket.create_connection((host_address(), port_of(config.endpoint))).close()
    eventually(lambda: refused(hub, "broken_off"))
    assert sum(hub.counts().handshakes.values()) == refused(hub, "broken_off")


def test_an_engine_is_admitted_once_its_key_is_listed(address, made, keys, config, monkeypatch):
    monkeypatch.setattr(endpoints, "HANDSHAKE_TIMEOUT_SECONDS", 0.2)
    listed = made[KeyKind.ENGINE_PUBLIC]
    line = listed.read_text()
    listed.write_text(unlisted_key_line())
    hub = Hub()
    listener, link = ZmqListener(address, hub, keys), open_link(config)
    link.send(hello(ME))
    eventually(lambda: refused(hub, "unknown_key") >= 2)
    assert hub.ranks() == ()
    listed.write_text(line)
    eventually(hub.ranks)
    link.close()
    listener.close()


def test_a_removed_key_admits_no_new_connection(made, address, keys, config, hub, listener):
    link = open_link(config)
    link.send(hello(ME))
    eventually(hub.ranks)
    made[KeyKind.ENGINE_PUBLIC].write_text(unlisted_key_line())
    again = open_link(config)
    eventually(lambda: refused(hub, "unknown_key"))
    # Existing connections stay open.
    link.send(snapshot(ME, 1))
    eventually(lambda: hub.ranks()[0].snapshot)
    link.close()
    again.close()


@pytest.mark.parametrize("broken", ["", "engine-public abc\n", None], ids=["empty", "cut off", "gone"])
def test_an_invalid_key_list_leaves_the_keys_read_before(made, config, hub, listener, caplog, broken):
    listed = made[KeyKind.ENGINE_PUBLIC]
    line = listed.read_text()
    if broken is None:
        listed.unlink()
    else:
        listed.write_text(broken)
    links = [open_link(config), open_link(config)]
    for link, rank in zip(links, (ME, identity(1)), strict=True):
        link.send(hello(rank))
    eventually(lambda: len(hub.ranks()) == 2)
    (logged,) = [record for record in caplog.records if "keys read before remain" in record.message]
    assert str(listed) in logged.message
    assert line.split()[1] not in logged.message
    for link in links:
        link.close()


def test_a_connection_that_zeromq_gave_up_is_opened_again(config, keys):
    port, now = free_port(), [0.0]
    address = f"tcp://127.0.0.1:{port}"
    intruder = WebServer(port)
    link = ZmqLink(address, keys=engine_keys(config), clock=lambda: now[0])
    eventually(lambda: not link.send(hello(ME)))
    intruder.close()
    hub = Hub()
    listener = ZmqListener(address, hub, keys)
    assert not link.send(hello(ME))
    lost = link.dropped
    now[0] += RECONNECT_SECONDS
    assert not link.send(hello(ME))
    assert link.dropped > lost
    assert link.send(hello(ME))
    eventually(hub.ranks)
    link.close()
    listener.close()


class WebServer:
    """Answers each connection with an HTTP error."""

    def __init__(self, port):
        self._server = socket.create_server(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        with contextlib.suppress(OSError):
            while True:
                with self._server.accept()[0] as connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.recv(4096)

    def close(self):
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()


def test_both_sides_detect_a_silent_connection_loss(keys, config, monkeypatch):
    monkeypatch.setattr(endpoints, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(endpoints, "HEARTBEAT_TIMEOUT_SECONDS", 0.3)
    hub, port = Hub(), free_port()
    listener, relay = ZmqListener(f"tcp://127.0.0.1:{port}", hub, keys), Relay(port)
    link = ZmqLink(f"tcp://127.0.0.1:{relay.port}", keys=engine_keys(config))
    link.send(snapshot(ME, 1))
    eventually(hub.ranks)
    eventually(link.receive)
    assert (relay.connections, relay.cut()) == (1, 2)
    # Each end closes its connection, and the engine reconnects.
    eventually(lambda: relay.closed_after_cut == 2)
    link.send(snapshot(ME, 2))
    eventually(lambda: hub.ranks()[0].snapshot.step == 2)
    eventually(link.receive)
    assert relay.connections == 2
    link.close()
    listener.close()
    relay.close()


def test_an_engine_never_waits_for_an_unresponsive_host(config):
    # The kernel accepts the first connection for a program that never reads; then the backlog is full.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as hole, contextlib.ExitStack() as held:
        keys = engine_keys(config)
        for _ in range(2):
            link = ZmqLink(f"tcp://127.0.0.1:{hole.getsockname()[1]}", keys=keys, capacity=100)
            held.callback(link.close)
            started = time.monotonic()
            for step in range(3000):
                link.send(snapshot(ME, step))
                link.send(Violations(identity=ME, rows=(violation(),)))
                assert link.receive() == []
            link.close(0.0)
            assert time.monotonic() - started < 10
            assert link.dropped > 2500


def test_while_admission_fails_no_engine_is_admitted_and_the_hub_is_blind(listener, hub, config, monkeypatch):
    right, late = identity(), identity(rank=1)
    early = open_link(config)
    early.send(snapshot(right, 1))
    eventually(hub.ranks)
    monkeypatch.setattr(Admission, "process", lambda self: 1 / 0)
    link = open_link(config)
    link.send(hello(late))
    eventually(lambda: hub.counts().faults.get("zmq_listener", 0) >= 2)
    assert hub.verdict()[0] == "blind"
    assert [rank.identity for rank in hub.ranks()] == [right]
    monkeypatch.undo()
    eventually(lambda: len(hub.ranks()) == 2)
    assert listener.alive
    for one in (early, link):
        one.close()


@pytest.mark.parametrize("scheme", ["ipc", "inproc"])
def test_keys_are_refused_where_they_are_not_used(tmp_path, keys, config, scheme):
    address = f"{scheme}://{tmp_path}/x.sock"
    rule = "keys are for tcp:// only" if scheme == "ipc" else "not an ipc:// or tcp://"
    for opener in (
        lambda: open_link(msgspec.structs.replace(config, endpoint=address)),
        lambda: ZmqListener(address, Hub(), keys),
    ):
        with pytest.raises(ConfigurationError, match=rule) as caught:
            opener()
        assert caught.value.value == address
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_a_port_in_use_is_refused_without_leaks(address, keys):
    threads = threading.active_count()
    occupied = socket.create_server((host_address(), port_of(address)))
    with occupied, pytest.raises(ConfigurationError, match="Address already in use"):
        ZmqListener(address, Hub(), keys)
    assert threading.active_count() == threads
    ZmqListener(address, Hub(), keys).close()


def test_many_refused_peers_do_not_delay_close(listener, hub, config):
    links = [misconfigured_link(config, change) for change in (other_engine, other_service, None) * 5]
    eventually(lambda: sum(hub.counts().handshakes.values()) > 50)
    started = time.monotonic()
    listener.close()
    assert not listener.alive
    assert time.monotonic() - started < 10
    for link in links:
        link.close()
