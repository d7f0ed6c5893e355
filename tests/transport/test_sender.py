from __future__ import annotations

import threading
import time

import pytest

from canary_obs.hub.hub import Hub
from canary_obs.records import Command, EngineMessage, Pause, Ping, Snapshot, Violations
from canary_obs.transport import sender as sender_module
from canary_obs.transport.links import ZmqLink
from canary_obs.transport.listener import ZmqListener
from canary_obs.transport.sender import SenderThread
from tests.service.fakes import eventually, hello, identity, snapshot, violation

ME = identity()


class FakeLink:
    """A ZmqLink that accepts messages while it has room and records which threads used it."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room, self.full, self.dropped = room, False, 0
        self.sent: list[EngineMessage] = []
        self.commands: list[Command] = []
        self.threads: set[str] = set()
        self.attempts = 0
        self.closed: float | None = None

    def send(self, message: EngineMessage) -> bool:
        self.threads.add(threading.current_thread().name)
        self.attempts += 1
        self.full = len(self.sent) >= self.room
        if self.full:
            self.dropped += not isinstance(message, Snapshot)
            return False
        self.sent.append(message)
        return True

    def receive(self) -> list[Command]:
        self.threads.add(threading.current_thread().name)
        commands, self.commands = self.commands, []
        return commands

    def peer_age_seconds(self, now: float) -> float | None:
        return 3.0

    def close(self, linger_seconds: float = 0.0) -> None:
        self.threads.add(threading.current_thread().name)
        self.closed = linger_seconds


def rows(slot: int) -> Violations:
    return Violations(identity=ME, rows=(violation(slot),))


def slots(messages: list[EngineMessage]) -> list[int]:
    return [row.slot for message in messages if isinstance(message, Violations) for row in message.rows]


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def sender(link):
    sender = SenderThread(link)
    yield sender
    sender.close()


def test_only_the_sender_thread_uses_the_link(sender, link):
    link.commands = [Pause()]
    assert sender.send(hello(ME))
    assert sender.send(rows(1))
    assert eventually(sender.receive) == [Pause()]
    eventually(lambda: len(link.sent) == 2)
    assert sender.receive() == []
    assert sender.peer_age_seconds(0.0) == 3.0
    sender.close(1.5)
    sender.close(1.5)
    assert link.closed == 1.5
    assert link.threads == {"canary-sender"}


def test_messages_other_than_snapshots_are_sent_at_once(sender, link, monkeypatch):
    monkeypatch.setattr(sender_module, "POLL_SECONDS", 3600.0)
    eventually(lambda: sender.send(rows(1)) and len(link.sent) > 0)  # the next poll is an hour away
    eventually(lambda: not sender._outbox)
    before = len(link.sent)
    sender.send(snapshot(ME, 1))
    sender.send(rows(2))
    eventually(lambda: len(link.sent) == before + 2)
    assert isinstance(link.sent[before], Snapshot)  # in the order of `send`


def test_a_full_queue_keeps_violations_and_drops_snapshots(monkeypatch):
    monkeypatch.setattr(sender_module, "POLL_SECONDS", 0.005)
    link = FakeLink(room=1)
    sender = SenderThread(link, capacity=5)
    assert sender.send(rows(0))
    eventually(lambda: link.sent)
    assert sender.send(snapshot(ME, 1))
    eventually(lambda: link.attempts == 2)  # the snapshot: the next one replaces it
    assert [sender.send(rows(slot)) for slot in range(1, 8)] == [True] * 5 + [False] * 2
    attempts = link.attempts
    eventually(lambda: link.attempts > attempts + 3)
    assert sender.dropped == 2  # not the waiting ones, however often they were retried, and no snapshot
    link.room = 100
    eventually(lambda: len(link.sent) == 6)
    assert slots(link.sent) == [0, 1, 2, 3, 4, 5]
    assert sender.dropped == 2
    sender.close()


def test_a_full_queue_is_not_retried_at_every_poll(monkeypatch):
    monkeypatch.setattr(sender_module, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(sender_module, "POLLS_BETWEEN_RETRIES", 1 << 30)
    link = FakeLink(room=0)
    sender = SenderThread(link)
    sender.send(rows(0))
    eventually(lambda: link.full)
    link.room = 1
    for slot in range(50):
        sender.send(rows(slot))
    wait_for_two_polls(sender)
    assert link.attempts == 1
    sender.close()  # close retries at once
    assert slots(link.sent) == [0]


def wait_for_two_polls(sender: SenderThread) -> None:
    for _ in range(2):
        sender._wakeup.set()
        eventually(lambda: not sender._wakeup.is_set())


def test_an_exception_of_the_link_loses_a_message_but_not_the_thread(sender, link, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(link, "send", lambda _: 1 / 0)
        sender.send(rows(1))
        eventually(lambda: sender.dropped == 1)
    assert "a message to the service was lost" in caplog.text
    sender.send(rows(2))
    eventually(lambda: slots(link.sent) == [2])


def test_flush_waits_until_the_queue_is_empty_or_the_timeout(monkeypatch):
    monkeypatch.setattr(sender_module, "POLL_SECONDS", 3600.0)
    link = FakeLink()
    sender = SenderThread(link)
    for slot in range(100):
        sender.send(snapshot(ME, slot))
    sender.flush(30.0)
    assert len(link.sent) == 100
    link.room = 0
    sender.send(rows(1))
    sender.flush(0.01)
    eventually(lambda: link.full)
    sender.close()
    started = time.monotonic()
    sender.flush(3600.0)
    assert time.monotonic() - started < 60.0


def test_commands_beyond_one_calls_limit_wait(sender, link):
    link.commands = [Ping() for _ in range(100)]
    eventually(lambda: len(sender._inbox) == 100)
    assert [len(sender.receive()) for _ in range(3)] == [64, 36, 0]


def test_after_close_messages_are_dropped(sender):
    sender.close()
    assert not sender.send(snapshot(ME, 1))
    assert sender.dropped == 0
    assert not sender.send(hello(ME))
    assert sender.dropped == 1


def test_close_waits_for_queued_messages_or_the_timeout(tmp_path):
    endpoint = f"ipc://{tmp_path}/run/service.sock"
    hub = Hub()
    listener = ZmqListener(endpoint, hub)
    closing = SenderThread(ZmqLink(endpoint))
    for slot in range(200):
        assert closing.send(rows(slot))
    closing.close(5.0)
    assert eventually(lambda: len(hub.violations()) == 200)
    listener.close()
    unconnected = SenderThread(ZmqLink(f"ipc://{tmp_path}/run/unconnected.sock"))
    unconnected.send(rows(1))
    started = time.monotonic()
    unconnected.close(0.2)
    assert 0.1 < time.monotonic() - started < 5.0
