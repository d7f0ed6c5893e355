"""The interface to which a listener delivers messages; the hub implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from canary_obs.errors import WireError
from canary_obs.records import Command, EngineMessage
from canary_obs.vocabulary import HandshakeCause

Reply = Callable[[Command], None]


class MessageSink(Protocol):
    """Thread-safe; no method blocks on the network."""

    def ingest(self, message: EngineMessage, reply: Reply) -> None:
        """Process one message; `reply` sends a command to its sender and never blocks."""

    def undecodable_frame(self, error: WireError) -> None:
        """A frame could not be decoded."""

    def handshake_refused(self, cause: HandshakeCause) -> None:
        """A connection was refused."""

    def fault(self, part: str, error: Exception) -> None:
        """A part of the service failed."""

    def tick(self) -> None:
        """Called several times a second, for pings and timeouts."""
