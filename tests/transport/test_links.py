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
from canary_obs.transport import links as mailbox
from canary_obs.transport.links import LocalLink, ZmqLink
from canary_obs.transport.listener import FRAMES_PER_CYCLE, LocalListener, ZmqListener
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
        link.deliver(Ping())
    assert len(link.receive()) == 3


def test_a_closed_local_link_takes_nothing_and_close_waits_no_longer_than_told():
    link = LocalLink()
    link.send(hello(ME))
    started = time.monotonic()
    link.close(0.05)
    assert time.monotonic() - started < 5
    assert not link.send(hello(ME))
    assert link.dropped == 1


def test_a_listener_that_meets_a_bug_says_so_and_goes_on(monkeypatch):
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


def test_without_a_service_nothing_blocks_and_violations_find_room(endpoint):
    link = ZmqLink(endpoint, capacity=100)
    started = time.monotonic()
    sent = sum(link.send(snapshot(ME, step)) for step in range(10_000))
    assert sent == mailbox.UNHEARD_SNAPSHOTS
    assert link.dropped == 10_000 - sent
    # ZeroMQ may hold a few more than asked; the queue is bounded all the same.
    rows = Violations(identity=ME, rows=(violation(),))
    assert 0 < sum(link.send(rows) for _ in range(10_000)) <= 2 * 100
    assert link.receive() == []
    assert link.peer_age_seconds(time.monotonic()) is None
    assert time.monotonic() - started < 10
    link.close()


def test_an_unheard_link_still_probes(endpoint):
    now = [0.0]
    link = ZmqLink(endpoint, clock=lambda: now[0])
    while link.send(snapshot(ME, 1)):
        pass
    now[0] += mailbox.PROBE_SECONDS
    assert link.send(snapshot(ME, 1))
    assert not link.send(snapshot(ME, 1))
    link.close()


def test_what_was_queued_arrives_when_the_service_comes_late(endpoint, link):
    link.send(hello(ME))
    link.send(Violations(identity=ME, rows=(violation(9),)))
    listener = ZmqListener(endpoint, Hub())
    event = eventually(hub_of(listener).violations)[0]
    assert event.violation.slot == 9
    listener.close()


def test_a_link_outlives_the_service_and_greets_the_next(endpoint, link):
    first = ZmqListener(endpoint, Hub())
    link.send(hello(ME))
    eventually(hub_of(first).ranks)
    first.close()
    second = ZmqListener(endpoint, Hub())

    def greeted():
        link.send(snapshot(ME, 1))
        return any(command.want_hello for command in link.receive() if isinstance(command, Ping))

    assert eventually(greeted)
    second.close()


def test_close_lets_the_last_words_leave(endpoint, listener):
    link = ZmqLink(endpoint)
    link.send(Violations(identity=ME, rows=(violation(7),)))
    link.close(5.0)
    link.close(5.0)
    assert not link.send(hello(ME))
    assert link.receive() == []
    assert eventually(hub_of(listener).violations)[0].violation.slot == 7


def test_an_oversized_message_is_dropped_and_counted(link, monkeypatch):
    monkeypatch.setattr(mailbox.wire, "MAX_MESSAGE_BYTES", 10)
    assert not link.send(hello(ME))
    assert link.dropped == 1


def test_garbage_on_the_socket_is_counted_and_harmless(listener, link):
    link._socket.send(b"not ours")
    link._socket.send_multipart([b"kvc\x02", b"\xc1"])
    eventually(lambda: hub_of(listener).counts().undecodable == 2)
    link.send(hello(ME))
    eventually(hub_of(listener).ranks)


def test_what_had_arrived_when_the_service_stops_is_taken(endpoint, monkeypatch):
    hub, busy, go_on = Hub(), threading.Event(), threading.Event()
    ingest = hub.ingest

    def held_up(*arguments):
        busy.set()
        assert go_on.wait(30)
        ingest(*arguments)

    monkeypatch.setattr(hub, "ingest", held_up)
    listener, link = ZmqListener(endpoint, hub), ZmqLink(endpoint)
    sent = 3 * FRAMES_PER_CYCLE
    for step in range(sent):
        assert link.send(Violations(identity=ME, rows=(violation(step),)))
    assert busy.wait(30)
    closing = threading.Thread(target=listener.close)
    closing.start()
    link.close(linger_seconds=30.0)  # returns when all is on its way
    go_on.set()
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
        ("tcp://:9000", "no host is named"),
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


def test_a_taken_tcp_port_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="Address already in use"):
            ZmqListener(f"tcp://127.0.0.1:{taken.getsockname()[1]}", Hub())


# The socket file.


def test_the_socket_is_for_its_owner_only_whatever_the_umask(tmp_path):
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


def test_a_second_service_is_refused_and_the_first_goes_on(endpoint, listener, link):
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()} is listening there"):
        ZmqListener(endpoint, Hub())
    link.send(hello(ME))
    eventually(hub_of(listener).ranks)


def test_another_programs_socket_is_not_taken_over(tmp_path):
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


def test_a_file_in_the_way_is_left_alone(tmp_path):
    path = tmp_path / "x.sock"
    path.write_text("precious")
    with pytest.raises(ConfigurationError, match="not a socket is in the way"):
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


def test_a_folder_everyone_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigurationError, match="may be written by everyone"):
        ZmqListener(f"ipc://{tmp_path}/x.sock", Hub())
    with pytest.raises(ConfigurationError, match="may be written by everyone"):
        ZmqLink(f"ipc://{tmp_path}/x.sock")


def test_the_lock_is_released_when_binding_fails(tmp_path):
    path = tmp_path / "x.sock"
    path.write_text("in the way")
    with pytest.raises(ConfigurationError):
        ZmqListener(f"ipc://{path}", Hub())
    path.unlink()
    ZmqListener(f"ipc://{path}", Hub()).close()
