"""Who may connect to the service: keys are checked, refused handshakes counted and logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from canary_obs.transport.keys import ServiceKeys
from canary_obs.vocabulary import HandshakeCause

log = logging.getLogger("canary_obs")
SECONDS_BETWEEN_LINES = 60.0  # of one cause: strangers must not fill a disk
MESSAGES_PER_CALL = 256

_ZAP_ADDRESS, _ZAP_VERSION, _ZAP_DOMAIN = "inproc://zeromq.zap.01", b"1.0", b"canary_obs"
# 300 and not 400: after a 400 an engine's socket never tries again, even when its key is admitted later.
_ADMITTED, _REFUSED = b"200", b"300"
_MONITORED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EXPLANATIONS = {
    HandshakeCause.UNKNOWN_KEY: "its key is not among those of KV_CANARY_ENGINE_PUBLIC_KEYS_FILE",
    HandshakeCause.SERVICE_KEY: "it expects another service key (its KV_CANARY_SERVICE_PUBLIC_KEY_FILE)",
    HandshakeCause.MECHANISM: "one side has key files set and the other has none",
    HandshakeCause.PROTOCOL: "it violates the ZeroMQ protocol",
    HandshakeCause.BROKEN_OFF: "it disconnected before the handshake was complete",
}


class Admission:
    """Belongs to a listener's socket and its thread; nothing here waits."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        keys: ServiceKeys | None,
        refused: Callable[[HandshakeCause], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the socket, which is not bound yet. Raises ZMQError. The context's end closes all."""
        self._keys, self._refused, self._clock = keys, refused, clock
        self._logged: dict[HandshakeCause, float] = {}
        self._zap: zmq.Socket[bytes] | None = None
        if keys is not None:
            self._zap = socket.context.socket(zmq.ROUTER)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(_ZAP_ADDRESS)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            # Without this an unanswered question counts as a yes.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_MONITORED)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Sockets to poll; `process` serves them."""
        return [self._monitor] if self._zap is None else [self._monitor, self._zap]

    def process(self) -> None:
        """Answer key requests, and count refused handshakes."""
        if self._zap is not None:
            for frames in _waiting(self._zap):
                self._answer(self._zap, frames)
        for frames in _waiting(self._monitor):
            self._count(_cause(frames))

    def _answer(self, zap: zmq.Socket[bytes], frames: list[bytes]) -> None:
        # ZAP 1.0: a return address of two frames; version, request id, domain, peer address, peer identity,
        # mechanism; with CURVE then the peer's public key, 32 bytes.
        route, (_, number, domain, address, _, mechanism, *credentials) = frames[:2], frames[2:]
        asked = (domain, mechanism, len(credentials)) == (_ZAP_DOMAIN, b"CURVE", 1)
        key = z85.encode(credentials[0]) if asked else b""
        admitted = self._keys is not None and self._keys.engines.admits(key)
        status = _ADMITTED if admitted else _REFUSED
        zap.send_multipart([*route, _ZAP_VERSION, number, status, b"", b"", b""], zmq.NOBLOCK)
        if not admitted:
            who = f" from {address.decode('ascii', 'replace')} with public key {key.decode()}"
            self._count(HandshakeCause.UNKNOWN_KEY, who)

    def _count(self, cause: HandshakeCause, who: str = "") -> None:
        self._refused(cause)
        now = self._clock()
        if now - self._logged.get(cause, float("-inf")) >= SECONDS_BETWEEN_LINES:
            self._logged[cause] = now
            log.warning("canary_obs: a connection%s was refused: %s", who, _EXPLANATIONS[cause])


def _cause(frames: list[bytes]) -> HandshakeCause:
    event = parse_monitor_message(frames)
    if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return HandshakeCause.BROKEN_OFF
    return {
        int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): HandshakeCause.SERVICE_KEY,
        int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): HandshakeCause.MECHANISM,
    }.get(int(event["value"]), HandshakeCause.PROTOCOL)


def _waiting(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    for _ in range(MESSAGES_PER_CALL):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield frames
