"""A thread that owns the engine's socket, so that the engine thread neither encodes nor sends."""

from __future__ import annotations

import logging
import threading
from collections import deque

from canary_obs.config import CanaryConfig
from canary_obs.records import Command, EngineMessage, Snapshot
from canary_obs.transport.keys import engine_keys
from canary_obs.transport.links import COMMANDS_PER_CALL, QUEUED_MESSAGES, Background, EngineLink, ZmqLink

log = logging.getLogger("canary_obs")

# Interval at which the socket is polled. A snapshot waits for the next poll; other messages wake the thread.
POLL_SECONDS = 0.1
# A socket whose queue is full is retried after this many polls.
POLLS_BETWEEN_RETRIES = 10
_JOIN_SECONDS = 1.0


class SenderThread:
    """An EngineLink whose `send` and `receive` only touch in-memory queues.

    The ZmqLink is used by this thread alone. When its queue is full, messages other than snapshots wait here
    in order; beyond `capacity` waiting messages the next one is dropped.
    """

    def __init__(self, link: ZmqLink, capacity: int = QUEUED_MESSAGES) -> None:
        self._link, self._capacity = link, capacity
        self.background: Background | None = None
        self._outbox: deque[EngineMessage] = deque()
        self._inbox: deque[Command] = deque(maxlen=QUEUED_MESSAGES)
        self._rejected = 0  # by `send`: queue full, or closed; counted by the engine thread
        self._lost = 0  # by the socket; counted by the sender thread
        self._polls_to_retry = 0
        self._wakeup, self._outbox_empty = threading.Event(), threading.Event()
        self._closed = False
        self._linger_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="canary-sender", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Messages that were not sent, but for snapshots."""
        return self._rejected + self._lost

    def send(self, message: EngineMessage) -> bool:
        """Queue a message; False when the queue is full, or after close."""
        if self._closed or len(self._outbox) >= self._capacity:
            self._rejected += not isinstance(message, Snapshot)
            return False
        self._outbox.append(message)
        if not isinstance(message, Snapshot):
            self._wakeup.set()
        return True

    def receive(self) -> list[Command]:
        """Commands that arrived since the last call; at most COMMANDS_PER_CALL."""
        if not self._inbox:
            return []
        return [self._inbox.popleft() for _ in range(min(len(self._inbox), COMMANDS_PER_CALL))]

    def peer_age_seconds(self, now: float) -> float | None:
        """Time since the service's last message; None = none received."""
        return self._link.peer_age_seconds(now)

    def flush(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until queued messages are handed to the socket."""
        if not self._closed:
            self._outbox_empty.clear()
            self._wakeup.set()
            self._outbox_empty.wait(timeout)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Send queued messages for up to `linger_seconds`, then release the socket; idempotent."""
        if not self._closed:
            self._linger_seconds = linger_seconds
            self._closed = True
            self._wakeup.set()
        self._thread.join(linger_seconds + _JOIN_SECONDS)

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wakeup.wait(POLL_SECONDS)
            self._wakeup.clear()
            closing = self._closed
            try:
                self._inbox.extend(self._link.receive())
                self._send_queued()
                self._send_background()
            except Exception:
                # If the thread died, the service would look dead.
                log.exception("canary_obs: a message to the service was lost")
                self._lost += 1
            if not self._outbox:
                self._outbox_empty.set()
        self._link.close(self._linger_seconds)

    def _send_background(self) -> None:
        # A full queue has no room for it, and nobody who reads it.
        if self.background is not None and not self._link.full and (message := self.background()) is not None:
            self._link.send(message)

    def _send_queued(self) -> None:
        self._polls_to_retry -= 1
        if self._link.full and self._polls_to_retry > 0 and not self._closed:
            return
        while self._outbox:
            message, dropped = self._outbox.popleft(), self._link.dropped
            sent = self._link.send(message)
            keep = not sent and self._link.full and not isinstance(message, Snapshot)
            self._lost += self._link.dropped - dropped - keep
            if keep:
                self._outbox.appendleft(message)
                self._polls_to_retry = POLLS_BETWEEN_RETRIES
                return


def open_link(config: CanaryConfig) -> EngineLink:
    """Open the link to the configured endpoint. Raises ConfigurationError."""
    return SenderThread(ZmqLink(config.endpoint, keys=engine_keys(config)))
