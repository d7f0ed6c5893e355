"""A thread between an engine and its line: frames and sockets cost the engine's thread nothing."""

from __future__ import annotations

import logging
import threading
from collections import deque

from canary_obs.config import CanaryConfig
from canary_obs.records import Command, EngineMessage, Snapshot
from canary_obs.transport.keys import engine_keys
from canary_obs.transport.links import COMMANDS_PER_CALL, QUEUED_MESSAGES, EngineLink, ZmqLink

log = logging.getLogger("canary_obs")

# Between two looks at the line; whatever is not a snapshot wakes the courier at once.
TURN_SECONDS = 0.1
# A line whose queue is full is tried again after so many turns.
TURNS_BETWEEN_TRIALS = 10
_JOIN_SECONDS = 1.0


class SenderThread:
    """An EngineLink: the engine's thread leaves messages and takes commands, and touches nothing else.

    The ZmqLink belongs to the courier's thread from here on. A message that finds its queue full waits, and
    those behind it; when `capacity` of them do, the next is dropped and counted.
    """

    def __init__(self, link: ZmqLink, capacity: int = QUEUED_MESSAGES) -> None:
        self._link, self._capacity = link, capacity
        self._outbox: deque[EngineMessage] = deque()
        self._inbox: deque[Command] = deque(maxlen=QUEUED_MESSAGES)
        self._refused = 0  # by `send`: too many wait, or closed
        self._lost = 0  # by the line; the courier's thread counts these
        self._turns_to_trial = 0
        self._bell, self._emptied = threading.Event(), threading.Event()
        self._closed = False
        self._linger = 0.0
        self._thread = threading.Thread(target=self._run, name="canary-courier", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Messages that were not handed over."""
        return self._refused + self._lost

    def send(self, message: EngineMessage) -> bool:
        """Leave a message; False when too many wait already, or after close."""
        if self._closed or len(self._outbox) >= self._capacity:
            self._refused += 1
            return False
        self._outbox.append(message)
        if not isinstance(message, Snapshot):
            self._bell.set()
        return True

    def receive(self) -> list[Command]:
        """Commands that the courier brought since the last call."""
        if not self._inbox:
            return []
        return [self._inbox.popleft() for _ in range(min(len(self._inbox), COMMANDS_PER_CALL))]

    def peer_age_seconds(self, now: float) -> float | None:
        """Time since the service's last message."""
        return self._link.peer_age_seconds(now)

    def flush(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until what was left has been handed to the line: ahead of an end."""
        if not self._closed:
            self._emptied.clear()
            self._bell.set()
            self._emptied.wait(timeout)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Hand over what waits, give it up to `linger_seconds` to leave, then release the line."""
        if not self._closed:
            self._linger = linger_seconds
            self._closed = True
            self._bell.set()
        self._thread.join(linger_seconds + _JOIN_SECONDS)

    def _run(self) -> None:
        closing = False
        while not closing:
            self._bell.wait(TURN_SECONDS)
            self._bell.clear()
            closing = self._closed
            try:
                self._inbox.extend(self._link.receive())
                self._deliver()
            except Exception:
                # A courier that dies silently would look like a dead service.
                log.exception("canary_obs: a message to the service was lost")
                self._lost += 1
            if not self._outbox:
                self._emptied.set()
        self._link.close(self._linger)

    def _deliver(self) -> None:
        self._turns_to_trial -= 1
        if self._link.full and self._turns_to_trial > 0 and not self._closed:
            return
        while self._outbox:
            message, dropped = self._outbox.popleft(), self._link.dropped
            sent = self._link.send(message)
            kept = not sent and self._link.full and not isinstance(message, Snapshot)
            self._lost += self._link.dropped - dropped - kept
            if kept:
                self._outbox.appendleft(message)
                self._turns_to_trial = TURNS_BETWEEN_TRIALS
                return


def open_link(config: CanaryConfig) -> EngineLink:
    """The link to the service that the settings name. Raises ConfigurationError."""
    return SenderThread(ZmqLink(config.endpoint, keys=engine_keys(config)))
