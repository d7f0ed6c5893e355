"""The engine's end of the transport: an in-process link and a ZeroMQ link."""

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
from canary_obs.transport.endpoint import (
    check_folder_owner,
    claim_folder,
    configure_socket,
    endpoint_error,
    parse_endpoint,
)
from canary_obs.transport.keys import EngineKeys

# Asked by a link's own thread, which runs while the engine's thread is busy: a message to send, or None.
Background = Callable[[], EngineMessage | None]

QUEUED_MESSAGES = 1000
COMMANDS_PER_CALL = 64
# While the service does not answer, snapshots must not use up the queue that violations need: after this many
# unanswered snapshots, one is sent every PROBE_SECONDS only, so that a new service still learns of the rank.
# What is not sent then is not lost: counters only grow, and the next snapshot has all that this one had.
UNANSWERED_SNAPSHOTS = 64
PROBE_SECONDS = 5.0
# A connection that accepts nothing although its queue has room was given up by ZeroMQ; it is opened again
# after this long without a message from the service.
RECONNECT_SECONDS = 15.0

_POLLIN = int(zmq.POLLIN)  # bit operations on the enumeration member take ten times as long

Clock = Callable[[], float]


class EngineLink(Protocol):
    """A rank's connection to the service. No method raises; only `flush` and `close` wait."""

    background: Background | None  # None = nothing to ask

    @property
    def dropped(self) -> int:
        """Messages that were not sent."""

    def send(self, message: EngineMessage) -> bool:
        """Queue a message; False = dropped, and counted, but for snapshots to a service that is away."""

    def receive(self) -> list[Command]:
        """Commands that arrived since the last call; at most COMMANDS_PER_CALL."""

    def peer_age_seconds(self, now: float) -> float | None:
        """Time since the service's last message, `now` from time.monotonic(); None = none received."""

    def flush(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until queued messages are handed to the socket."""

    def close(self, linger_seconds: float = 0.0) -> None:
        """Send queued messages for up to `linger_seconds`, then release everything; idempotent."""


class LocalLink:
    """Both ends in one process. The service's end is used by a LocalListener."""

    def __init__(self, capacity: int = QUEUED_MESSAGES, clock: Clock = time.monotonic) -> None:
        self._messages: SimpleQueue[EngineMessage] = SimpleQueue()
        self._commands: deque[Command] = deque(maxlen=capacity)
        self._capacity, self._clock = capacity, clock
        self._last_received: float | None = None
        self.background: Background | None = None
        self._message_consumed = threading.Condition()
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
        """Commands sent since the last call; at most COMMANDS_PER_CALL."""
        if not self._commands:
            return []
        count = min(len(self._commands), COMMANDS_PER_CALL)
        return [self._commands.popleft() for _ in range(count)]

    def peer_age_seconds(self, now: float) -> float | None:
        """Time since the service's last command or ping; None = none received."""
        received = self._last_received
        return None if received is None else max(0.0, now - received)

    def flush(self, timeout: float) -> None:
        """Do nothing: the service reads from the queue itself."""

    def close(self, linger_seconds: float = 0.0) -> None:
        """Stop sending; wait up to `linger_seconds` until the service has read the queued messages."""
        self._closed = True
        with self._message_consumed:
            self._message_consumed.wait_for(self._messages.empty, timeout=linger_seconds)

    def send_command(self, command: Command) -> None:
        """Service end: queue a command for the engine; a full queue drops its oldest command."""
        self._commands.append(command)
        self._last_received = self._clock()

    def next_message(self, timeout: float) -> EngineMessage | None:
        """Service end: the next message, or None after `timeout` seconds."""
        try:
            message = self._messages.get(timeout=timeout)
        except Empty:
            return None if self.background is None or self._closed else self.background()
        with self._message_consumed:
            self._message_consumed.notify_all()
        return message


class ZmqLink:
    """A DEALER socket with a bounded queue that reconnects by itself.

    Not thread-safe, except for `peer_age_seconds`; in an engine the SenderThread owns it.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: EngineKeys | None = None,
        capacity: int = QUEUED_MESSAGES,
        clock: Clock = time.monotonic,
    ) -> None:
        endpoint = parse_endpoint(address, keyed=keys is not None)
        claim_folder(endpoint)
        check_folder_owner(endpoint)
        self._address, self._capacity, self._clock = address, capacity, clock
        self._last_received: float | None = None
        # Since the service's last message:
        self._unanswered_snapshots = self._unanswered_messages = 0
        self._connected_at = clock()
        self._last_snapshot = float("-inf")
        self._closed = False
        self.dropped = 0
        self.full = False  # the last message found no room in the queue
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.DEALER)
            configure_socket(self._socket, endpoint, capacity)
            self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            if keys is not None:
                self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.service)
                self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
                self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise endpoint_error(address, f"cannot be used: {error}") from None

    def send(self, message: EngineMessage) -> bool:
        """Queue for the service; False when the queue is full, the link closed, or the message too big.

        A snapshot for which there is no room is not counted as dropped: the next one says the same and more.
        """
        is_snapshot = isinstance(message, Snapshot)
        now = self._clock()
        if self._closed:
            self.dropped += 1
            return False
        if is_snapshot and self._is_throttled(now):
            return False
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.full = True
            self.dropped += not is_snapshot
            self._reconnect_if_given_up(now)
            return False
        except (WireError, zmq.ZMQError):
            self.dropped += 1
            return False
        self.full = False
        self._unanswered_messages += 1
        if is_snapshot:
            self._unanswered_snapshots += 1
            self._last_snapshot = now
        return True

    def _is_throttled(self, now: float) -> bool:
        return (
            self._unanswered_snapshots >= UNANSWERED_SNAPSHOTS and now - self._last_snapshot < PROBE_SECONDS
        )

    def _reconnect_if_given_up(self, now: float) -> None:
        # ZeroMQ does not retry a peer that broke the protocol: another program on the port, or keys on one
        # side only. What was queued on that connection is lost.
        silent_since = max(self._connected_at, self._last_received or self._connected_at)
        if self._unanswered_messages < self._capacity and now - silent_since >= RECONNECT_SECONDS:
            self._connected_at = now
            self.dropped += self._unanswered_messages - self._unanswered_snapshots
            self._unanswered_messages = self._unanswered_snapshots = 0
            with suppress(zmq.ZMQError):
                self._socket.disconnect(self._address)
            with suppress(zmq.ZMQError):
                self._socket.connect(self._address)

    def receive(self) -> list[Command]:
        """Commands that arrived; a frame that cannot be decoded is skipped and is no sign of life."""
        commands: list[Command] = []
        for _ in range(0 if self._closed else COMMANDS_PER_CALL):
            # Nearly all reads are empty, and reading EVENTS is four times cheaper than the exception.
            try:
                if not int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                    break
                commands.append(wire.decode_command(self._socket.recv(zmq.NOBLOCK)))
            except WireError:
                continue
            except zmq.ZMQError:
                break
        if commands:
            self._last_received = self._clock()
            self._unanswered_snapshots = self._unanswered_messages = 0
        return commands

    def peer_age_seconds(self, now: float) -> float | None:
        """Time since the service's last command or ping; None = none received."""
        received = self._last_received
        return None if received is None else max(0.0, now - received)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Send queued messages for up to `linger_seconds`, then close; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._socket.close(linger=round(linger_seconds * 1000))
        self._context.term()
