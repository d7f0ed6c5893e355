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


class Line:
    """The inner link: takes messages while it has room, and says who used it."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room, self.full, self.dropped = room, False, 0
        self.taken: list[EngineMessage] = []
        self.commands: list[Command] = []
        self.users: set[str] = set()
        self.trials = 0
        self.closed: float | None = None

    def send(self, message: EngineMessage) -> bool:
        self.users.add(threading.current_thread().name)
        self.trials += 1
        self.full = len(self.taken) >= self.room
        if self.full:
            self.dropped += 1
            return False
        self.taken.append(message)
        return True

    def receive(self) -> list[Command]:
        self.users.add(threading.current_thread().name)
        found, self.commands = self.commands, []
        return found

    def peer_age_seconds(self, now: float) -> float | None:
        return 3.0

    def close(self, linger_seconds: float = 0.0) -> None:
        self.users.add(threading.current_thread().name)
        self.closed = linger_seconds


def rows(slot: int) -> Violations:
    return Violations(identity=ME, rows=(violation(slot),))


def slots(messages: list[EngineMessage]) -> list[int]:
    return [row.slot for message in messages if isinstance(message, Violations) for row in message.rows]


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def sender(line):
    made = SenderThread(line)
    yield made
    made.close()


def test_only_the_couriers_thread_touches_the_line(sender, line):
    line.commands = [Pause()]
    assert sender.send(hello(ME))
    assert sender.send(rows(1))
    assert eventually(sender.receive) == [Pause()]
    eventually(lambda: len(line.taken) == 2)
    assert sender.receive() == []
    assert sender.peer_age_seconds(0.0) == 3.0
    sender.close(1.5)
    sender.close(1.5)
    assert line.closed == 1.5
    assert line.users == {"canary-sender"}


def test_what_is_no_snapshot_leaves_at_once(sender, line, monkeypatch):
    monkeypatch.setattr(sender_module, "POLL_SECONDS", 3600.0)
    eventually(lambda: sender.send(rows(1)) and len(line.taken) > 0)  # from here on it waits for an hour
    eventually(lambda: not sender._outbox)
    before = len(line.taken)
    sender.send(snapshot(ME, 1))
    sender.send(rows(2))
    eventually(lambda: len(line.taken) == before + 2)
    assert isinstance(line.taken[before], Snapshot)  # in the order in which they were left


def test_a_full_queue_keeps_violations_waiting_and_lets_snapshots_go(monkeypatch):
    monkeypatch.setattr(sender_module, "POLL_SECONDS", 0.005)
    line = Line(room=1)
    sender = SenderThread(line, capacity=5)
    assert sender.send(rows(0))
    eventually(lambda: line.taken)
    assert sender.send(snapshot(ME, 1))
    eventually(lambda: sender.dropped == 1)  # the snapshot: the next one tells more
    assert [sender.send(rows(slot)) for slot in range(1, 8)] == [True] * 5 + [False] * 2
    trials = line.trials
    eventually(lambda: line.trials > trials + 3)
    assert sender.dropped == 3  # not those that wait, however often they were tried
    line.room = 100
    eventually(lambda: len(line.taken) == 6)
    assert slots(line.taken) == [0, 1, 2, 3, 4, 5]
    assert sender.dropped == 3
    sender.close()


def test_a_full_queue_is_not_tried_at_every_poll(monkeypatch):
    monkeypatch.setattr(sender_module, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(sender_module, "POLLS_BETWEEN_RETRIES", 1 << 30)
    line = Line(room=0)
    sender = SenderThread(line)
    sender.send(rows(0))
    eventually(lambda: line.full)
    line.room = 1
    for slot in range(50):
        sender.send(rows(slot))
    time_for_polls(sender)
    assert line.trials == 1
    sender.close()  # the last trial, whatever the turn
    assert slots(line.taken) == [0]


def time_for_polls(sender: SenderThread) -> None:
    """Until its thread has gone round twice."""
    for _ in range(2):
        sender._wakeup.set()
        eventually(lambda: not sender._wakeup.is_set())


def test_a_bug_of_the_line_loses_a_message_and_not_the_courier(sender, line, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(line, "send", lambda _: 1 / 0)
        sender.send(rows(1))
        eventually(lambda: sender.dropped == 1)
    assert "a message to the service was lost" in caplog.text
    sender.send(rows(2))
    eventually(lambda: slots(line.taken) == [2])


def test_flush_waits_until_the_line_has_all_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(sender_module, "POLL_SECONDS", 3600.0)
    line = Line()
    sender = SenderThread(line)
    for slot in range(100):
        sender.send(snapshot(ME, slot))
    sender.flush(30.0)
    assert len(line.taken) == 100
    line.room = 0
    sender.send(rows(1))
    sender.flush(0.01)
    assert line.full
    sender.close()
    started = time.monotonic()
    sender.flush(3600.0)
    assert time.monotonic() - started < 60.0


def test_more_commands_than_one_call_takes(sender, line):
    line.commands = [Ping() for _ in range(100)]
    eventually(lambda: len(sender._inbox) == 100)
    assert [len(sender.receive()) for _ in range(3)] == [64, 36, 0]


def test_after_close_nothing_is_taken(sender):
    sender.close()
    assert not sender.send(hello(ME))
    assert sender.dropped == 1


def test_close_waits_for_what_was_left_and_not_for_ever(tmp_path):
    endpoint = f"ipc://{tmp_path}/run/service.sock"
    hub = Hub()
    listener = ZmqListener(endpoint, hub)
    last_words = SenderThread(ZmqLink(endpoint))
    for slot in range(200):
        assert last_words.send(rows(slot))
    last_words.close(5.0)
    assert eventually(lambda: len(hub.violations()) == 200)
    listener.close()
    nobody = SenderThread(ZmqLink(f"ipc://{tmp_path}/run/nobody.sock"))
    nobody.send(rows(1))
    started = time.monotonic()
    nobody.close(0.2)
    assert 0.1 < time.monotonic() - started < 5.0
