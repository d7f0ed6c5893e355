from __future__ import annotations

import threading
import time

import pytest

from canary_obs.hub.hub import Hub
from canary_obs.records import Command, EngineMessage, Pause, Ping, Snapshot, Violations
from canary_obs.transport import sender as couriers
from canary_obs.transport.links import ZmqLink
from canary_obs.transport.listener import ZmqListener
from canary_obs.transport.sender import Courier
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
def courier(line):
    made = Courier(line)
    yield made
    made.close()


def test_only_the_couriers_thread_touches_the_line(courier, line):
    line.commands = [Pause()]
    assert courier.send(hello(ME))
    assert courier.send(rows(1))
    assert eventually(courier.receive) == [Pause()]
    eventually(lambda: len(line.taken) == 2)
    assert courier.receive() == []
    assert courier.peer_age_seconds(0.0) == 3.0
    courier.close(1.5)
    courier.close(1.5)
    assert line.closed == 1.5
    assert line.users == {"canary-courier"}


def test_what_is_no_snapshot_leaves_at_once(courier, line, monkeypatch):
    monkeypatch.setattr(couriers, "TURN_SECONDS", 3600.0)
    eventually(lambda: courier.send(rows(1)) and len(line.taken) > 0)  # from here on it waits for an hour
    eventually(lambda: not courier._outbox)
    before = len(line.taken)
    courier.send(snapshot(ME, 1))
    courier.send(rows(2))
    eventually(lambda: len(line.taken) == before + 2)
    assert isinstance(line.taken[before], Snapshot)  # in the order in which they were left


def test_a_full_line_keeps_violations_waiting_and_lets_snapshots_go(monkeypatch):
    monkeypatch.setattr(couriers, "TURN_SECONDS", 0.005)
    line = Line(room=1)
    courier = Courier(line, capacity=5)
    assert courier.send(rows(0))
    eventually(lambda: line.taken)
    assert courier.send(snapshot(ME, 1))
    eventually(lambda: courier.dropped == 1)  # the snapshot: the next one tells more
    assert [courier.send(rows(slot)) for slot in range(1, 8)] == [True] * 5 + [False] * 2
    trials = line.trials
    eventually(lambda: line.trials > trials + 3)
    assert courier.dropped == 3  # not those that wait, however often they were tried
    line.room = 100
    eventually(lambda: len(line.taken) == 6)
    assert slots(line.taken) == [0, 1, 2, 3, 4, 5]
    assert courier.dropped == 3
    courier.close()


def test_a_full_line_is_not_tried_in_every_turn(monkeypatch):
    monkeypatch.setattr(couriers, "TURN_SECONDS", 0.001)
    monkeypatch.setattr(couriers, "TURNS_BETWEEN_TRIALS", 1 << 30)
    line = Line(room=0)
    courier = Courier(line)
    courier.send(rows(0))
    eventually(lambda: line.full)
    line.room = 1
    for slot in range(50):
        courier.send(rows(slot))
    time_for_turns(courier)
    assert line.trials == 1
    courier.close()  # the last trial, whatever the turn
    assert slots(line.taken) == [0]


def time_for_turns(courier: Courier) -> None:
    """Until its thread has gone round twice."""
    for _ in range(2):
        courier._bell.set()
        eventually(lambda: not courier._bell.is_set())


def test_a_bug_of_the_line_loses_a_message_and_not_the_courier(courier, line, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(line, "send", lambda _: 1 / 0)
        courier.send(rows(1))
        eventually(lambda: courier.dropped == 1)
    assert "a message to the service was lost" in caplog.text
    courier.send(rows(2))
    eventually(lambda: slots(line.taken) == [2])


def test_flush_waits_until_the_line_has_all_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(couriers, "TURN_SECONDS", 3600.0)
    line = Line()
    courier = Courier(line)
    for slot in range(100):
        courier.send(snapshot(ME, slot))
    courier.flush(30.0)
    assert len(line.taken) == 100
    line.room = 0
    courier.send(rows(1))
    courier.flush(0.01)
    assert line.full
    courier.close()
    started = time.monotonic()
    courier.flush(3600.0)
    assert time.monotonic() - started < 60.0


def test_more_commands_than_one_call_takes(courier, line):
    line.commands = [Ping() for _ in range(100)]
    eventually(lambda: len(courier._inbox) == 100)
    assert [len(courier.receive()) for _ in range(3)] == [64, 36, 0]


def test_after_close_nothing_is_taken(courier):
    courier.close()
    assert not courier.send(hello(ME))
    assert courier.dropped == 1


def test_close_waits_for_what_was_left_and_not_for_ever(tmp_path):
    endpoint = f"ipc://{tmp_path}/run/service.sock"
    hub = Hub()
    listener = ZmqListener(endpoint, hub)
    last_words = Courier(ZmqLink(endpoint))
    for slot in range(200):
        assert last_words.send(rows(slot))
    last_words.close(5.0)
    assert eventually(lambda: len(hub.violations()) == 200)
    listener.close()
    nobody = Courier(ZmqLink(f"ipc://{tmp_path}/run/nobody.sock"))
    nobody.send(rows(1))
    started = time.monotonic()
    nobody.close(0.2)
    assert 0.1 < time.monotonic() - started < 5.0
