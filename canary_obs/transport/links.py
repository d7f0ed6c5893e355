"""The engine's end of the wire: sends and receives without ever waiting."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

import zmq

from canary_obs.errors import WireError
from canary_obs.records import Command, EngineMessage, Snapshot
from canary_obs.transport import wire
from canary_obs.transport.endpoint import check_owner, parse_endpoint, refusal, tune
from canary_obs.transport.keys import EngineKeys

QUEUED_MESSAGES = 1000
COMMANDS_PER_CALL = 64
# While the service is silent, snapshots must not take the queue that violations need: after this many
# unanswered ones a snapshot goes out only every PROBE_SECONDS, so that a new service still learns of us.
UNHEARD_SNAPSHOTS = 64
PROBE_SECONDS = 5.0
# A line that takes nothing, though its queue has room, has been given up by ZeroMQ; after this much silence
# it is opened anew.
REVIVE_SECONDS = 15.0

_POLLIN = int(zmq.POLLIN)  # an operation on the enumeration is Python's, and ten times as long

Clock = Callable[[], float]


class EngineLink(Protocol):
    """A rank's line to the service. No method blocks or raises after it was opened."""

    @property
    def dropped(self) -> int:
        """Messages that were not handed over."""

    def send(self, message: EngineMessage) -> bool:
        """Hand a message over; False = dropped and counted."""

    def receive(self) -> list[Command]:
        """Commands that arrived since the last call; at most COMMANDS_PER_CALL."""

    def peer_age_seconds(self, now: float) -> float | None:
        """Time since the service's last message, `now` from time.monotonic(); None = never heard."""

    def flush(self, timeout: float) -> None:
        """Wait up to so many seconds until queued messages leave without this thread."""

    def close(self, linger_seconds: float = 0.0) -> None:
        """Let queued messages leave for up to this long, then release everything; idempotent."""


class LocalLink:
    """Both ends in one process. The engine sends and receives; a LocalListener takes and delivers."""

    def __init__(self, capacity: int = QUEUED_MESSAGES, clock: Clock = time.monotonic) -> None:
        self._messages: SimpleQueue[EngineMessage] = SimpleQueue()
        self._commands: deque[Command] = deque(maxlen=capacity)
        self._capacity, self._clock = capacity, clock
        self._heard: float | None = None
        self._message_received = threading.Condition()
        self._closed = False
        self.dropped = 0

    def send(self, message: EngineMessage) -> bool:
        """Queue for the service; False when the queue is full or the link is closed."""
        if self._closed or self._messages.qsize() >= self._capacity:
            self.dropped += 1
            return False
        self._messages.put(message)
        return True

    def receive(self) -> list[Command]:
        """Commands delivered since the last call."""
        if not self._commands:
            return []
        count = min(len(self._commands), COMMANDS_PER_CALL)
        return [self._commands.popleft() for _ in range(count)]

    def peer_age_seconds(self, now: float) -> float | None:
        """Time since the last delivery."""
        heard = self._heard
        return None if heard is None else max(0.0, now - heard)

    def flush(self, timeout: float) -> None:
        """Nothing to wait for: the service takes them from the queue."""

    def close(self, linger_seconds: float = 0.0) -> None:
        """Stop sending; wait up to `linger_seconds` for the service to take what is queued."""
        self._closed = True
        with self._message_received:
            self._message_received.wait_for(self._messages.empty, timeout=linger_seconds)

    def deliver(self, command: Command) -> None:
        """Service end: leave a command for the engine; the oldest makes room when the box is full."""
        self._commands.append(command)
        self._heard = self._clock()

    def take(self, timeout: float) -> EngineMessage | None:
        """Service end: the next message, or None after `timeout` seconds."""
        try:
            message = self._messages.get(timeout=timeout)
        except Empty:
            return None
        with self._message_received:
            self._message_received.notify_all()
        return message


class ZmqLink:
    """A DEALER socket with a bounded queue; reconnects by itself, and a dead service costs nothing."""

    def __init__(
        self,
        address: str,
        *,
        keys: EngineKeys | None = None,
        capacity: int = QUEUED_MESSAGES,
        clock: Clock = time.monotonic,
    ) -> None:
        endpoint = parse_endpoint(address, keyed=keys is not None)
        check_owner(endpoint)
        self._address, self._capacity, self._clock = address, capacity, clock
        # In an engine the sender thread alone uses the link, but another may close it, and tests share links.
        self._lock = threading.Lock()
        self._heard: float | None = None
        self._unheard = self._queued = 0  # snapshots, messages sent since the service's last word
        self._opened = clock()
        self._last_snapshot = float("-inf")
        self._closed = False
        self.dropped = 0
        self.full = False  # the last message found no room in the queue
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.DEALER)
            tune(self._socket, endpoint, capacity)
            self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            if keys is not None:
                self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.service)
                self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
                self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise refusal(address, f"cannot be used: {error}") from None

    def send(self, message: EngineMessage) -> bool:
        """Queue for the service; False when the queue is full, the link closed, or the message too big."""
        if self._hand_over(message):
            return True
        self.dropped += 1
        return False

    def _hand_over(self, message: EngineMessage) -> bool:
        snapshot = isinstance(message, Snapshot)
        now = self._clock()
        if snapshot and self._unheard >= UNHEARD_SNAPSHOTS and now - self._last_snapshot < PROBE_SECONDS:
            return False
        try:
            frame = wire.encode(message)
            with self._lock:
                if self._closed:
                    return False
                try:
                    self._socket.send(frame, zmq.NOBLOCK)
                except zmq.Again:
                    self.full = True
                    self._revive(now)
                    return False
                self.full = False
                self._queued += 1
        except (WireError, zmq.ZMQError):
            return False
        if snapshot:
            self._unheard += 1
            self._last_snapshot = now
        return True

    def _revive(self, now: float) -> None:
        # ZeroMQ never tries again after a peer that broke the protocol: another program on the port, or
        # keys on one side only. What was put into such a line is lost.
        silent_since = max(self._opened, self._heard or self._opened)
        if self._queued < self._capacity and now - silent_since >= REVIVE_SECONDS:
            self._opened = now
            self.dropped += self._queued
            self._queued = 0
            with suppress(zmq.ZMQError):
                self._socket.disconnect(self._address)
            self._socket.connect(self._address)

    def receive(self) -> list[Command]:
        """Commands that arrived; a frame that cannot be decoded is skipped and is no sign of life."""
        commands: list[Command] = []
        with self._lock:
            for _ in range(0 if self._closed else COMMANDS_PER_CALL):
                # Asking is four times cheaper than the exception of an empty read, and nearly all are empty.
                try:
                    if not int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                        break
                    commands.append(wire.decode_command(self._socket.recv(zmq.NOBLOCK)))
                except WireError:
                    continue
                except zmq.ZMQError:
                    break
        if commands:
            self._heard = self._clock()
            self._unheard = self._queued = 0
        return commands

    def peer_age_seconds(self, now: float) -> float | None:
        """Time since the last command or ping."""
        heard = self._heard
        return None if heard is None else max(0.0, now - heard)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Give queued messages up to `linger_seconds` to leave, then close."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._socket.close(linger=round(linger_seconds * 1000))
        self._context.term()
