"""The service's end of the wire: threads that carry messages to the hub and commands back."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from contextlib import suppress

import zmq

from canary_obs.errors import WireError
from canary_obs.hub.hub import Hub
from canary_obs.records import Command
from canary_obs.transport import wire
from canary_obs.transport.admission import Admission
from canary_obs.transport.endpoint import check_owner, parse_endpoint, refusal, tune
from canary_obs.transport.keys import ServiceKeys
from canary_obs.transport.links import QUEUED_MESSAGES, LocalLink
from canary_obs.transport.socket_file import SocketFile

TICK_SECONDS = 0.2
FRAMES_PER_TURN = 256
# At the end: until nothing has come for so long, at most for so long.
QUIET_SECONDS, DRAIN_SECONDS = 0.02, 1.0


class LocalListener:
    """Joins a LocalLink to a hub in the same process."""

    def __init__(self, link: LocalLink, hub: Hub) -> None:
        self._link, self._hub = link, hub
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canary-local-listener", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether messages are still carried."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Take what is queued, then stop; idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._turn(TICK_SECONDS)
        while self._turn(0.0):
            pass

    def _turn(self, timeout: float) -> bool:
        try:
            message = self._link.take(timeout)
            if message is not None:
                self._hub.ingest(message, self._link.deliver)
            self._hub.tick()
        except Exception as error:  # noqa: BLE001 - a listener that dies silently would look like a dead engine
            self._hub.fault("local_listener", error)
            return True
        return message is not None


class ZmqListener:
    """A ROUTER socket in a thread of its own. Opening raises ConfigurationError; nothing is left behind."""

    def __init__(self, address: str, hub: Hub, keys: ServiceKeys | None = None) -> None:
        endpoint = parse_endpoint(address, keyed=keys is not None)
        check_owner(endpoint)
        self._hub = hub
        self._outbox: deque[tuple[bytes, Command]] = deque(maxlen=QUEUED_MESSAGES)
        self._stop = threading.Event()
        self._file = SocketFile(endpoint) if endpoint.path else None
        # Commands come from other threads; a ZeroMQ socket belongs to one. The bell wakes its thread.
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            tune(self._socket, endpoint, QUEUED_MESSAGES)
            self._admission = Admission(self._socket, keys, hub.handshakes.refused)
            if self._file:
                self._socket.setsockopt(zmq.USE_FD, self._file.detach())
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._bell.close()
            self._ear.close()
            if self._file:
                self._file.close()
            remedy = "Stop the other program, or choose another endpoint."
            raise refusal(address, f"cannot be bound: {error}", remedy) from None
        self._thread = threading.Thread(target=self._run, name="canary-zmq-listener", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether messages are still carried."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Take what has arrived, then stop, release the socket and remove its file; idempotent."""
        self._stop.set()
        self._ring()
        self._thread.join()
        self._bell.close()
        self._ear.close()
        if self._file:
            self._file.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._ear, zmq.POLLIN)
        for waiting in self._admission.sockets:
            poller.register(waiting, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                self._turn(poller)
            self._drain()
            self._post()
        finally:
            self._context.destroy(linger=100)

    def _turn(self, poller: zmq.Poller) -> None:
        try:
            poller.poll(round(TICK_SECONDS * 1000))
            with suppress(BlockingIOError):
                self._ear.recv(4096)
            self._admission.turn()
            self._take()
            self._hub.tick()
            self._post()
        except Exception as error:  # noqa: BLE001 - a listener that dies silently would look like a dead engine
            self._hub.fault("zmq_listener", error)
            self._stop.wait(TICK_SECONDS)

    def _take(self) -> None:
        for _ in range(FRAMES_PER_TURN):
            try:
                sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._ingest(sender, frames)

    def _drain(self) -> None:
        # An engine that goes on sending is not waited for.
        deadline = time.monotonic() + DRAIN_SECONDS
        try:
            while time.monotonic() < deadline and self._socket.poll(round(QUIET_SECONDS * 1000)):
                self._take()
        except Exception as error:  # noqa: BLE001 - the socket must be released all the same
            self._hub.fault("zmq_listener", error)

    def _ingest(self, sender: bytes, frames: list[bytes]) -> None:
        try:
            message = wire.decode_message(b"".join(frames))
        except WireError as error:
            self._hub.undecodable(error)
            return
        self._hub.ingest(message, lambda command: self._reply(sender, command))

    def _reply(self, sender: bytes, command: Command) -> None:
        self._outbox.append((sender, command))
        self._ring()

    def _ring(self) -> None:
        # A full bell has been rung already; a closed one has nobody left to wake.
        with suppress(OSError):
            self._bell.send(b"!")

    def _post(self) -> None:
        while self._outbox:
            sender, command = self._outbox.popleft()
            # An engine that is gone or does not read must not hold up the others.
            with suppress(zmq.Again):
                self._socket.send_multipart([sender, wire.encode(command)], zmq.NOBLOCK)
