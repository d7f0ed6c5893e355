from __future__ import annotations

import os
import socket
import stat
import threading
import time

import pytest

from canary_obs.config import CanaryConfig
from canary_obs.errors import ConfigurationError
from canary_obs.hub.hub import Hub
from canary_obs.records import Pause, Ping, Violations
from canary_obs.transport import links, listener as listeners, wire
from canary_obs.transport.links import LocalLink, ZmqLink
from canary_obs.transport.listener import LocalListener, ZmqListener
from canary_obs.transport.sender import open_link
from tests.service.fakes import eventually, hello, identity, snapshot, violation

ME = identity()


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/run/service.sock"


@pytest.fixture
def listener(endpoint):
    listener = ZmqListener(endpoint, Hub())
    yield listener
    listener.close()


@pytest.fixture
def link(endpoint):
    link = ZmqLink(endpoint)
    yield link
    link.close()


def hub_of(listener):
    return listener._sink


# Within one process.


def test_a_local_link_carries_both_ways():
    hub, link = Hub(), LocalLink()
    assert link.peer_age_seconds(time.monotonic()) is None
    listener = LocalListener(link, hub)
    assert link.send(hello(ME))
    assert link.send(snapshot(ME, 1))
    eventually(lambda: hub.ranks() and hub.ranks()[0].snapshot)
    hub.pause()
    assert Pause() in eventually(link.receive)
    assert link.peer_age_seconds(time.monotonic()) < 10
    link.send(snapshot(ME, 2))
    listener.close()
    assert hub.ranks()[0].snapshot.step == 2


def test_a_full_local_link_drops_and_counts():
    link = LocalLink(capacity=3)
    assert [link.send(snapshot(ME, step)) for step in range(5)] == [True, True, True, False, False]
    assert link.dropped == 2
    for _ in range(5):
        link.send_command(Ping())
    assert len(link.receive()) == 3


def test_a_closed_local_link_sends_nothing_and_close_times_out():
    link = LocalLink()
    link.send(hello(ME))
    started = time.monotonic()
    link.close(0.05)
    assert time.monotonic() - started < 5
    assert not link.send(hello(ME))
    assert link.dropped == 1


def test_a_listener_reports_an_exception_and_continues(monkeypatch):
    hub, link = Hub(), LocalLink()
    monkeypatch.setattr(hub, "tick", lambda: 1 / 0)
    listener = LocalListener(link, hub)
    link.send(snapshot(ME, 1))
    eventually(lambda: hub.counts().faults.get("local_listener"))
    assert listener.alive
    assert hub.verdict()[0] == "blind"
    monkeypatch.undo()
    listener.close()


# Over ZeroMQ.


def test_a_zmq_link_carries_both_ways(listener, link):
    assert link.send(hello(ME))
    assert link.send(snapshot(ME, 1))
    hub = hub_of(listener)
    eventually(lambda: hub.ranks() and hub.ranks()[0].snapshot)
    hub.pause()
    received = []
    eventually(lambda: received.extend(link.receive()) or Pause() in received)
    assert link.peer_age_seconds(time.monotonic()) < 10


def test_without_a_service_nothing_blocks_and_violations_are_queued(endpoint):
    link = ZmqLink(endpoint, capacity=100)
    started = time.monotonic()
    sent = sum(link.send(snapshot(ME, step)) for step in range(10_000))
    assert sent == links.UNANSWERED_SNAPSHOTS
    assert link.dropped == 0, "the next snapshot has all that these had"
    # ZeroMQ may queue a few more than configured, but the queue is bounded.
    rows = Violations(identity=ME, rows=(violation(),))
    queued = sum(link.send(rows) for _ in range(10_000))
    assert 0 < queued <= 2 * 100
    assert link.dropped == 10_000 - queued
    assert link.receive() == []
    assert link.peer_age_seconds(time.monotonic()) is None
    assert time.monotonic() - started < 10
    link.close()


def test_an_unanswered_link_sends_a_snapshot_now_and_then(endpoint):
    now = [0.0]
    link = ZmqLink(endpoint, clock=lambda: now[0])
    while link.send(snapshot(ME, 1)):
        pass
    now[0] += links.PROBE_SECONDS
    assert link.send(snapshot(ME, 1))
    assert not link.send(snapshot(ME, 1))
    link.close()


def test_a_snapshot_for_which_a_full_queue_has_no_room_is_not_lost(endpoint):
    link = ZmqLink(endpoint, capacity=10)
    rows = Violations(identity=ME, rows=(violation(),))
    while link.send(rows):
        pass
    assert (link.full, link.dropped) == (True, 1)
    assert not link.send(snapshot(ME, 1))
    assert link.dropped == 1
    link.close()


def test_queued_messages_arrive_when_the_service_starts_late(endpoint, link):
    link.send(hello(ME))
    link.send(Violations(identity=ME, rows=(violation(9),)))
    listener = ZmqListener(endpoint, Hub())
    event = eventually(hub_of(listener).violations)[0]
    assert event.violation.slot == 9
    listener.close()


def test_a_link_reconnects_to_a_restarted_service_which_asks_for_a_hello(endpoint, link):
    first = ZmqListener(endpoint, Hub())
    link.send(hello(ME))
    eventually(hub_of(first).ranks)
    first.close()
    second = ZmqListener(endpoint, Hub())

    def asked_for_hello():
        link.send(snapshot(ME, 1))
        return any(command.want_hello for command in link.receive() if isinstance(command, Ping))

    assert eventually(asked_for_hello)
    second.close()


def test_close_sends_queued_messages(endpoint, listener):
    link = ZmqLink(endpoint)
    link.send(Violations(identity=ME, rows=(violation(7),)))
    link.close(5.0)
    link.close(5.0)
    assert not link.send(hello(ME))
    assert link.receive() == []
    assert eventually(hub_of(listener).violations)[0].violation.slot == 7


def test_an_oversized_message_is_dropped_and_counted(link, monkeypatch):
    monkeypatch.setattr(links.wire, "MAX_MESSAGE_BYTES", 10)
    assert not link.send(hello(ME))
    assert link.dropped == 1


def test_undecodable_frames_are_counted_and_harmless(listener, link):
    link._socket.send(b"not ours")
    link._socket.send(wire._HEADER + b"\xc1")
    eventually(lambda: hub_of(listener).counts().undecodable == 2)
    link.send(hello(ME))
    eventually(hub_of(listener).ranks)


def test_messages_that_arrived_before_close_are_delivered(endpoint, monkeypatch):
    hub, started, resume = Hub(), threading.Event(), threading.Event()
    ingest = hub.ingest

    def blocked_ingest(*arguments):
        started.set()
        assert resume.wait(30)
        ingest(*arguments)

    monkeypatch.setattr(hub, "ingest", blocked_ingest)
    monkeypatch.setattr(listeners, "FRAMES_PER_CYCLE", 4)
    listener, link = ZmqListener(endpoint, hub), ZmqLink(endpoint)
    sent = 12  # three cycles, and no more than the listener's queue holds
    for step in range(sent):
        assert link.send(Violations(identity=ME, rows=(violation(step),)))
    assert started.wait(30)
    closing = threading.Thread(target=listener.close)
    closing.start()
    link.close(linger_seconds=30.0)  # returns when all is sent
    resume.set()
    closing.join()
    assert hub.counts().messages["violations"] == sent
    assert not hub.counts().faults


# Endpoints.


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("inproc", "an object, not an address"),
        ("tcp://10.0.0.1:9000", "beyond loopback TCP needs keys"),
        ("tcp://*:9000", "beyond loopback TCP needs keys"),
        ("tcp://127.0.0.1;10.0.0.1:9000", "beyond loopback TCP needs keys"),
        ("tcp://:9000", "the host is missing"),
        ("tcp://127.0.0.1:0", "the port must be"),
        ("tcp://127.0.0.1:²", "the port must be"),
        ("tcp://127.0.0.1", "the port must be"),
        ("ipc://relative.sock", "must be absolute"),
        ("ipc:///" + "x" * 200, "the system allows"),
        ("udp://127.0.0.1:1", "not an ipc"),
        ("", "not an ipc"),
    ],
)
def test_bad_endpoints_are_refused_with_rule_and_remedy(address, rule):
    for opener in (
        lambda address: open_link(CanaryConfig(endpoint=address)),
        lambda address: ZmqListener(address, Hub()),
    ):
        with pytest.raises(ConfigurationError, match=rule) as caught:
            opener(address)
        assert caught.value.value == address
        assert "KV_CANARY_ENDPOINT" in caught.value.remedy


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_tcp_on_loopback_works(host):
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        port = probe.getsockname()[1]
    address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    listener, link = ZmqListener(address, Hub()), open_link(CanaryConfig(endpoint=address))
    link.send(hello(ME))
    eventually(hub_of(listener).ranks)
    link.close()
    listener.close()


def test_a_tcp_port_in_use_is_refused():
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        with pytest.raises(ConfigurationError, match="Address already in use"):
            ZmqListener(f"tcp://127.0.0.1:{occupied.getsockname()[1]}", Hub())


# The socket file.


def test_only_the_owner_may_use_the_socket_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        listener = ZmqListener(f"ipc://{tmp_path}/run/x.sock", Hub())
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run/x.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    listener.close()
    assert not (tmp_path / "run/x.sock").exists()


def test_a_second_service_is_refused_and_the_first_continues(endpoint, listener, link):
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()} is listening there"):
        ZmqListener(endpoint, Hub())
    link.send(hello(ME))
    eventually(hub_of(listener).ranks)


def test_another_programs_socket_is_not_replaced(tmp_path):
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigurationError, match="another program is listening"):
            ZmqListener(f"ipc://{path}", Hub())
        assert path.exists()


def test_a_stale_socket_is_replaced(tmp_path):
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    ZmqListener(f"ipc://{path}", Hub()).close()


def test_an_existing_file_is_not_replaced(tmp_path):
    path = tmp_path / "x.sock"
    path.write_text("precious")
    with pytest.raises(ConfigurationError, match="not a socket exists there"):
        ZmqListener(f"ipc://{path}", Hub())
    assert path.read_text() == "precious"


@pytest.mark.parametrize("folder", ["/proc/nobody", "/dev/null/x"])
def test_a_folder_that_cannot_be_written_is_refused(folder):
    threads = threading.active_count()
    with pytest.raises(ConfigurationError) as caught:
        ZmqListener(f"ipc://{folder}/x.sock", Hub())
    assert folder in str(caught.value)
    assert caught.value.remedy
    assert threading.active_count() == threads


def test_a_world_writable_folder_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigurationError, match="is writable by everyone"):
        ZmqListener(f"ipc://{tmp_path}/x.sock", Hub())
    with pytest.raises(ConfigurationError, match="is writable by everyone"):
        ZmqLink(f"ipc://{tmp_path}/x.sock")


def test_an_engine_that_starts_first_makes_the_default_folder_its_own(tmp_path, monkeypatch):
    """Else any local user could make it, and be sent what the engine finds."""
    folder = tmp_path / "canary_obs-0"
    address = f"ipc://{folder}/service.sock"
    monkeypatch.setattr("canary_obs.transport.endpoint.default_endpoint", lambda: address)
    ZmqLink(address).close()
    status = folder.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), 0o700)
    ZmqListener(address, Hub()).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_root_does_not_use_a_default_folder_that_another_user_made(tmp_path, monkeypatch):
    folder = tmp_path / "canary_obs-0"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    address = f"ipc://{folder}/service.sock"
    ZmqLink(address).close()  # as it was told to
    monkeypatch.setattr("canary_obs.transport.endpoint.default_endpoint", lambda: address)
    for open_end in (ZmqLink, lambda given: ZmqListener(given, Hub())):
        with pytest.raises(ConfigurationError, match="belongs to user 65534, not to 0"):
            open_end(address)


def test_the_lock_is_released_when_binding_fails(tmp_path):
    path = tmp_path / "x.sock"
    path.write_text("existing")
    with pytest.raises(ConfigurationError):
        ZmqListener(f"ipc://{path}", Hub())
    path.unlink()
    ZmqListener(f"ipc://{path}", Hub()).close()


def test_a_named_pipe_as_lock_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "s.sock.lock")
    with pytest.raises(ConfigurationError, match="is not a file"):
        ZmqListener(f"ipc://{tmp_path}/s.sock", Hub())
