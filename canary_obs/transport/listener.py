"""The service's end of the transport: threads that deliver messages to a sink and send commands back."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress

import zmq

from canary_obs.errors import AddressInUse, WireError
from canary_obs.records import Command
from canary_obs.transport import wire
from canary_obs.transport.admission import Admission
from canary_obs.transport.endpoint import check_folder_owner, configure_socket, endpoint_error, parse_endpoint
from canary_obs.transport.keys import ServiceKeys
from canary_obs.transport.links import QUEUED_MESSAGES, LocalLink
from canary_obs.transport.sink import MessageSink
from canary_obs.transport.socket_file import SocketFile

TICK_SECONDS = 0.2
FRAMES_PER_CYCLE = 256
# Per connection: its memory is bounded by this times wire.MAX_MESSAGE_BYTES. What remains is one message of
# several parts, of any size: libzmq keeps it until it is complete, and shows nothing of it before.
# No fewer: when a connection ends while its queue is full, libzmq loses what the kernel still holds of it.
RECEIVED_MESSAGES = 256
# At shutdown: drain until nothing has arrived for QUIET_SECONDS, for DRAIN_SECONDS at most.
QUIET_SECONDS, DRAIN_SECONDS = 0.02, 1.0


class LocalListener:
    """Connects a LocalLink to a sink in the same process."""

    def __init__(self, link: LocalLink, sink: MessageSink) -> None:
        self._link, self._sink = link, sink
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canary-local-listener", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Deliver the queued messages, then stop; idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._cycle(TICK_SECONDS)
        while self._cycle(0.0):
            pass

    def _cycle(self, timeout: float) -> bool:
        try:
            message = self._link.next_message(timeout)
            if message is not None:
                self._sink.ingest(message, self._link.send_command)
            self._sink.tick()
        except Exception as error:  # noqa: BLE001 - if the thread died, engines would look dead
            self._sink.fault("local_listener", error)
            return True
        return message is not None


class ZmqListener:
    """A ROUTER socket and the thread that owns it."""

    def __init__(self, address: str, sink: MessageSink, keys: ServiceKeys | None = None) -> None:
        """Bind and start. Raises ConfigurationError, and then releases everything."""
        endpoint = parse_endpoint(address, keyed=keys is not None)
        check_folder_owner(endpoint)
        self._sink = sink
        self._outbox: deque[tuple[bytes, Command]] = deque(maxlen=QUEUED_MESSAGES)
        self._stop = threading.Event()
        self._file = SocketFile(endpoint) if endpoint.path else None
        # Other threads queue commands, but only the owner may use a ZeroMQ socket: a socket pair wakes it.
        self._wakeup_send, self._wakeup_receive = socket.socketpair()
        self._wakeup_send.setblocking(False)
        self._wakeup_receive.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            configure_socket(self._socket, endpoint, QUEUED_MESSAGES)
            self._socket.setsockopt(zmq.RCVHWM, RECEIVED_MESSAGES)
            self._admission = Admission(self._socket, keys, sink.handshake_refused)
            if self._file:
                self._socket.setsockopt(zmq.USE_FD, self._file.detach())
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._wakeup_send.close()
            self._wakeup_receive.close()
            if self._file:
                self._file.close()
            remedy = "Stop the other program, or choose another endpoint."
            rule = f"cannot be bound: {error}"
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUse("endpoint", address, rule, remedy) from None
            raise endpoint_error(address, rule, remedy) from None
        self._thread = threading.Thread(target=self._run, name="canary-zmq-listener", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Deliver the messages that arrived, stop, release the socket and remove its file; idempotent."""
        self._stop.set()
        self._wake()
        self._thread.join()
        self._wakeup_send.close()
        self._wakeup_receive.close()
        if self._file:
            self._file.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup_receive, zmq.POLLIN)
        for admission_socket in self._admission.sockets:
            poller.register(admission_socket, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                self._cycle(poller)
            self._drain()
            self._send_commands()
        finally:
            self._context.destroy(linger=100)

    def _cycle(self, poller: zmq.Poller) -> None:
        try:
            poller.poll(round(TICK_SECONDS * 1000))
            with suppress(BlockingIOError):
                self._wakeup_receive.recv(4096)
            self._admission.process()
            self._receive()
            self._sink.tick()
            self._send_commands()
        except Exception as error:  # noqa: BLE001 - if the thread died, engines would look dead
            self._sink.fault("zmq_listener", error)
            self._stop.wait(TICK_SECONDS)

    def _receive(self) -> None:
        for _ in range(FRAMES_PER_CYCLE):
            try:
                sender = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame = self._socket.recv()
            if self._socket.getsockopt(zmq.RCVMORE):
                self._refuse_parts(len(frame))
            else:
                self._ingest(sender, frame)

    def _refuse_parts(self, size: int) -> None:
        """Disconnect the sender of a message of several parts, and discard the rest of it part by part."""
        parts, more = 1, True
        while more:
            part = self._socket.recv(copy=False)
            if parts == 1:
                _disconnect(part)
            parts, size, more = parts + 1, size + len(part), part.more
        text = f"a message of {parts} parts and {size} bytes: engines send one part; another program sent it"
        self._sink.undecodable_frame(WireError(text))

    def _drain(self) -> None:
        # Bounded, because an engine may keep sending.
        deadline = time.monotonic() + DRAIN_SECONDS
        try:
            while time.monotonic() < deadline and self._socket.poll(round(QUIET_SECONDS * 1000)):
                self._receive()
        except Exception as error:  # noqa: BLE001 - the socket must still be released
            self._sink.fault("zmq_listener", error)

    def _ingest(self, sender: bytes, frame: bytes) -> None:
        try:
            message = wire.decode_message(frame)
        except WireError as error:
            self._sink.undecodable_frame(error)
            return
        self._sink.ingest(message, lambda command: self._reply(sender, command))

    def _reply(self, sender: bytes, command: Command) -> None:
        self._outbox.append((sender, command))
        self._wake()

    def _wake(self) -> None:
        # With a full buffer the thread is about to wake anyway; after close there is none.
        with suppress(OSError):
            self._wakeup_send.send(b"!")

    def _send_commands(self) -> None:
        while self._outbox:
            sender, command = self._outbox.popleft()
            # An engine that disappeared or does not read must not delay the others.
            with suppress(zmq.Again):
                self._socket.send_multipart([sender, wire.encode(command)], zmq.NOBLOCK)


def _disconnect(part: zmq.Frame) -> None:
    # A ROUTER cannot drop one peer; libzmq does once its connection is shut down. Already closed is as good.
    with suppress(OSError, zmq.ZMQError):
        descriptor = os.dup(int(part.get(zmq.SRCFD)))
        with socket.socket(fileno=descriptor) as connection:
            connection.shutdown(socket.SHUT_RDWR)
