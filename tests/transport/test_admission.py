"""TCP with keys: who has one of the right keys gets through, nobody else, and each refusal is counted."""

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
from canary_obs.transport import endpoint as endpoints, links as mailbox
from canary_obs.transport.admission import Admission
from canary_obs.transport.keys import KeyKind, engine_keys, make_keys, service_keys
from canary_obs.transport.links import ZmqLink
from canary_obs.transport.listener import ZmqListener
from canary_obs.transport.sender import open_link
from tests.service.fakes import eventually, hello, identity, snapshot, violation
from tests.transport.relay import Relay

ME = identity()


def outside():
    """An address of this machine that is not loopback; loopback where there is none."""
    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family is socket.AF_INET and not entry.address.startswith("127.")
    ]
    return found[0] if found else "127.0.0.1"


def free_port():
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture
def made(tmp_path):
    return make_keys(tmp_path / "keys")


@pytest.fixture
def address():
    return f"tcp://{outside()}:{free_port()}"


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


def stranger_line():
    return f"engine-public {other_pair()['public'].decode()}\n"


def other_pair():
    public, secret = zmq.curve_keypair()
    return {"public": public, "secret": secret}


def other_service():
    return {"service": zmq.curve_keypair()[0]}


def stranger(config, change):
    """An engine with other keys than the right ones, or with none (then on loopback)."""
    if change is None:
        return ZmqLink(f"tcp://127.0.0.1:{port_of(config.endpoint)}")
    return ZmqLink(config.endpoint, keys=dataclasses.replace(engine_keys(config), **change()))


def test_with_the_right_keys_messages_and_commands_pass(listener, hub, config):
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
    # Without keys both ends find out at once: the engine may have hung up before the service has said so.
    [(other_pair, ["unknown_key"]), (other_service, ["service_key"]), (None, ["mechanism", "broken_off"])],
    ids=["unknown_key", "wrong_service_key", "no_keys"],
)
def test_with_other_keys_nothing_gets_in_and_the_engine_goes_on(
    listener, hub, config, caplog, change, causes
):
    caplog.set_level(logging.WARNING, "canary_obs")
    wrong = stranger(config, change)
    wrong.send(hello(ME))
    eventually(lambda: any(refused(hub, cause) for cause in causes))
    assert wrong.receive() == []
    assert wrong.peer_age_seconds(time.monotonic()) is None
    # Another engine is not held up by it, and is the only one that was heard.
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


def test_a_refusal_names_the_stranger_once_a_minute_and_no_secret(listener, hub, config, caplog):
    caplog.set_level(logging.WARNING, "canary_obs")
    keys = dataclasses.replace(engine_keys(config), **other_pair())
    links = [ZmqLink(config.endpoint, keys=keys) for _ in range(3)]
    eventually(lambda: refused(hub, "unknown_key") >= 3)
    (line,) = caplog.messages
    assert f"from {outside()} with public key {keys.public.decode()} was refused" in line
    assert keys.secret.decode() not in line
    for link in links:
        link.close()


OLDER = (
    b"\x01\x00" + b"\x03\x00hi",  # before version 2: a greeting of one empty frame
    b"\xff" + bytes(8) + b"\x7f" + b"\x01\x05" + b"\x00\x00" + b"\x00\x02hi",  # version 2, a DEALER
)


def test_what_speaks_an_older_protocol_or_another_does_not_get_in(listener, hub, config):
    for spoken in (*OLDER, b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((outside(), port_of(config.endpoint)), timeout=10) as connection:
            connection.sendall(spoken)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
    link = open_link(config)
    link.send(hello(ME))
    eventually(hub.ranks)
    assert (hub.counts().undecodable, sum(hub.counts().messages.values())) == (0, 1)
    link.close()


@pytest.mark.parametrize("spoken", OLDER)
def test_without_keys_the_same_bytes_are_a_message(spoken):
    hub, port = Hub(), free_port()
    listener = ZmqListener(f"tcp://127.0.0.1:{port}", hub)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(spoken)
        eventually(lambda: hub.counts().undecodable)
    listener.close()


def test_a_connection_that_is_broken_off_is_counted_as_such(listener, hub, config):
    socket.create_connection((outside(), port_of(config.endpoint))).close()
    eventually(lambda: refused(hub, "broken_off"))
    assert sum(hub.counts().handshakes.values()) == refused(hub, "broken_off")


def test_an_engine_is_let_in_once_its_key_is_listed(address, made, keys, config, monkeypatch):
    monkeypatch.setattr(endpoints, "HANDSHAKE_SECONDS", 0.2)
    listed = made[KeyKind.ENGINE_PUBLIC]
    line = listed.read_text()
    listed.write_text(stranger_line())
    hub = Hub()
    listener, link = ZmqListener(address, hub, keys), open_link(config)
    link.send(hello(ME))
    eventually(lambda: refused(hub, "unknown_key") >= 2)
    assert hub.ranks() == ()
    listed.write_text(line)
    eventually(hub.ranks)
    link.close()
    listener.close()


def test_a_key_that_is_no_longer_listed_lets_nobody_in_again(made, address, keys, config, hub, listener):
    link = open_link(config)
    link.send(hello(ME))
    eventually(hub.ranks)
    made[KeyKind.ENGINE_PUBLIC].write_text(stranger_line())
    again = open_link(config)
    eventually(lambda: refused(hub, "unknown_key"))
    # Who is in stays in.
    link.send(snapshot(ME, 1))
    eventually(lambda: hub.ranks()[0].snapshot)
    link.close()
    again.close()


@pytest.mark.parametrize("broken", ["", "engine-public abc\n", None], ids=["empty", "cut off", "gone"])
def test_a_list_that_cannot_be_used_leaves_the_one_before(made, config, hub, listener, caplog, broken):
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
    (told,) = [record for record in caplog.records if "keys read before stay" in record.message]
    assert str(listed) in told.message
    assert line.split()[1] not in told.message
    for link in links:
        link.close()


def test_a_line_that_zeromq_has_given_up_is_opened_anew(config, keys):
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
    now[0] += mailbox.REVIVE_SECONDS
    assert not link.send(hello(ME))
    assert link.dropped > lost
    assert link.send(hello(ME))
    eventually(hub.ranks)
    link.close()
    listener.close()


class WebServer:
    """Answers each connection with a page, whatever was asked."""

    def __init__(self, port):
        self._door = socket.create_server(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        with contextlib.suppress(OSError):
            while True:
                with self._door.accept()[0] as connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.recv(4096)

    def close(self):
        self._door.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._door.close()


def test_a_service_that_vanishes_without_a_word_is_noticed_on_both_sides(keys, config, monkeypatch):
    monkeypatch.setattr(endpoints, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(endpoints, "SILENCE_SECONDS", 0.3)
    hub, port = Hub(), free_port()
    listener, relay = ZmqListener(f"tcp://127.0.0.1:{port}", hub, keys), Relay(port)
    link = ZmqLink(f"tcp://127.0.0.1:{relay.port}", keys=engine_keys(config))
    link.send(snapshot(ME, 1))
    eventually(hub.ranks)
    eventually(link.receive)
    assert (relay.connections, relay.cut()) == (1, 2)
    # Each end hangs up by itself, and the engine comes back over a new connection.
    eventually(lambda: relay.hung_up == 2)
    link.send(snapshot(ME, 2))
    eventually(lambda: hub.ranks()[0].snapshot.step == 2)
    eventually(link.receive)
    assert relay.connections == 2
    link.close()
    listener.close()
    relay.close()


def test_an_engine_never_waits_for_a_host_that_does_not_answer(config):
    # The system accepts for a program that never reads; with its backlog full not even that.
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
            assert link.dropped > 5000


def test_while_admission_fails_nobody_gets_in_and_the_verdict_says_so(listener, hub, config, monkeypatch):
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
def test_keys_are_refused_where_nothing_asks_for_them(tmp_path, keys, config, scheme):
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


def test_a_taken_port_leaves_nothing_behind(address, keys):
    threads = threading.active_count()
    taken = socket.create_server((outside(), port_of(address)))
    with taken, pytest.raises(ConfigurationError, match="Address already in use"):
        ZmqListener(address, Hub(), keys)
    assert threading.active_count() == threads
    ZmqListener(address, Hub(), keys).close()


def test_a_flood_of_strangers_does_not_hold_up_the_end(listener, hub, config):
    links = [stranger(config, change) for change in (other_pair, other_service, None) * 5]
    eventually(lambda: sum(hub.counts().handshakes.values()) > 50)
    started = time.monotonic()
    listener.close()
    assert not listener.alive
    assert time.monotonic() - started < 10
    for link in links:
        link.close()
