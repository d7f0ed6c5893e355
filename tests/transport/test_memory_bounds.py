"""What one connection can make the service keep: messages of one part, and few of them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zmq

from canary_obs.hub.hub import Hub
from canary_obs.records import Violations
from canary_obs.transport import wire
from canary_obs.transport.links import ZmqLink
from canary_obs.transport.listener import RECEIVED_MESSAGES, ZmqListener
from tests.service.fakes import eventually, hello, identity, violation

ME = identity()
MIB = 1 << 20
SERVICE = """
import sys
from canary_obs.hub.hub import Hub
from canary_obs.transport.listener import ZmqListener
hub = Hub()
listener = ZmqListener(sys.argv[1], hub)
for _ in sys.stdin:
    print(hub.counts().undecodable, flush=True)
listener.close()
"""


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/run/service.sock"


@pytest.fixture
def hub():
    return Hub()


@pytest.fixture
def listener(endpoint, hub):
    listener = ZmqListener(endpoint, hub)
    yield listener
    listener.close()


@pytest.fixture
def peer():
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        yield peer


def test_a_message_of_several_parts_is_refused_and_costs_the_connection(listener, endpoint, hub, peer):
    monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    link = ZmqLink(endpoint)
    peer.connect(endpoint)
    frame = wire.encode(hello(ME))
    peer.send_multipart([frame[:9], frame[9:20], frame[20:]])
    assert monitor.poll(10_000), "the peer was not disconnected"
    peer.disable_monitor()
    monitor.close()
    eventually(lambda: hub.counts().undecodable)
    assert hub.ranks() == ()
    parts = f"a message of 3 parts and {len(frame)} bytes: engines send one part"
    assert parts in hub.verdict()[1][0]
    link.send(hello(ME))
    eventually(hub.ranks)
    link.close()


def test_a_connection_that_is_not_read_keeps_few_messages(endpoint, hub, peer, monkeypatch):
    """The rest stays with its sender."""
    entered, resume = threading.Event(), threading.Event()

    def blocked_ingest(*_):
        entered.set()
        assert resume.wait(30)

    monkeypatch.setattr(hub, "ingest", blocked_ingest)
    listener = ZmqListener(endpoint, hub)
    peer.setsockopt(zmq.SNDHWM, 1)
    peer.setsockopt(zmq.SNDTIMEO, 300)
    peer.connect(endpoint)
    frame = wire.encode(Violations(identity=ME, rows=(violation(request="r" * 100_000),)))
    peer.send(frame)
    assert entered.wait(30)
    accepted = 0
    with contextlib.suppress(zmq.Again):
        while accepted < 2 * RECEIVED_MESSAGES:
            peer.send(frame)
            accepted += 1
    resume.set()
    listener.close()
    # Besides the queue: the sender's message, and the buffers of kernel and libzmq.
    assert accepted <= RECEIVED_MESSAGES + 16


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process in /proc")
def test_messages_of_many_parts_cost_the_memory_of_one(endpoint):
    """Four messages of 48 x 4 MiB cost 960 MiB when they were joined, 206 MiB now."""
    service = subprocess.Popen(
        [sys.executable, "-c", SERVICE, endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def undecodable():
        print(file=service.stdin, flush=True)
        return int(service.stdout.readline())

    assert undecodable() == 0
    before = _peak_bytes(service.pid)
    part = bytes(4 * MIB)
    for count in range(4):
        # A connection each: what is sent on one that is being shut down is lost.
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(endpoint)
            peer.send_multipart([part] * 48, copy=False)
            eventually(lambda count=count: undecodable() > count, 60)
    grown = _peak_bytes(service.pid) - before
    service.communicate()
    assert grown < 300 * MIB
