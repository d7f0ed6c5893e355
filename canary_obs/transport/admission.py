"""Who may connect to the service: keys and users are checked, refused connections counted and logged."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from canary_obs.transport.keys import ServiceKeys
from canary_obs.vocabulary import HandshakeCause

log = logging.getLogger("canary_obs")
LOG_INTERVAL_SECONDS = 60.0  # per cause, so that refused peers cannot fill the disk
MESSAGES_PER_CALL = 256  # per socket

_ZAP_ADDRESS, _ZAP_VERSION, _ZAP_DOMAIN = "inproc://zeromq.zap.01", b"1.0", b"canary_obs"
# 300 and not 400: after a 400 ZeroMQ never reconnects, even when the engine's key is listed later.
_ADMITTED, _REFUSED = b"200", b"300"
_MONITORED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_ACCEPT_FAILED
)
# Of a connection that could not be accepted; a refused user leaves none of these.
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
_EXPLANATIONS = {
    HandshakeCause.UNKNOWN_KEY: "its key is not among those of KV_CANARY_ENGINE_PUBLIC_KEYS_FILE",
    HandshakeCause.SERVICE_KEY: "it expects another service key (its KV_CANARY_SERVICE_PUBLIC_KEY_FILE)",
    HandshakeCause.MECHANISM: "one side has key files set and the other has none",
    HandshakeCause.PROTOCOL: "it violates the ZeroMQ protocol",
    HandshakeCause.BROKEN_OFF: "it disconnected before the handshake was complete",
    HandshakeCause.OTHER_USER: "its process belongs neither to the service's user nor to root",
}


class Admission:
    """Answers ZAP key requests, counts refused connections. On the listener's thread; never blocks."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        keys: ServiceKeys | None,
        on_refused: Callable[[HandshakeCause], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Configure `socket`, which is not bound yet. Raises ZMQError.

        The sockets opened here are closed with the context of `socket`.
        """
        self._keys, self._on_refused, self._clock = keys, on_refused, clock
        self._logged_at: dict[HandshakeCause, float] = {}
        self._zap: zmq.Socket[bytes] | None = None
        if keys is not None:
            self._zap = socket.context.socket(zmq.ROUTER)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(_ZAP_ADDRESS)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            # Without this, libzmq admits a peer whose ZAP request is not answered.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        _admit_own_user(socket)
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_MONITORED)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Sockets to poll; `process` serves them."""
        return [self._monitor] if self._zap is None else [self._monitor, self._zap]

    def process(self) -> None:
        """Answer the waiting key requests and count refused handshakes."""
        if self._zap is not None:
            for frames in _receive_waiting(self._zap):
                self._answer_key_request(self._zap, frames)
        for frames in _receive_waiting(self._monitor):
            if (cause := _refusal_cause(frames)) is not None:
                self._count(cause)

    def _answer_key_request(self, zap: zmq.Socket[bytes], frames: list[bytes]) -> None:
        # ZAP 1.0: two routing frames; version, request id, domain, peer address, peer identity, mechanism;
        # with CURVE also the peer's public key of 32 bytes.
        route, (_, request_id, domain, address, _, mechanism, *credentials) = frames[:2], frames[2:]
        valid = (domain, mechanism, len(credentials)) == (_ZAP_DOMAIN, b"CURVE", 1)
        key = z85.encode(credentials[0]) if valid else b""
        admitted = self._keys is not None and self._keys.engines.admits(key)
        status = _ADMITTED if admitted else _REFUSED
        zap.send_multipart([*route, _ZAP_VERSION, request_id, status, b"", b"", b""], zmq.NOBLOCK)
        if not admitted:
            peer = f" from {address.decode('ascii', 'replace')} with public key {key.decode()}"
            self._count(HandshakeCause.UNKNOWN_KEY, peer)

    def _count(self, cause: HandshakeCause, peer: str = "") -> None:
        self._on_refused(cause)
        now = self._clock()
        if now - self._logged_at.get(cause, float("-inf")) >= LOG_INTERVAL_SECONDS:
            self._logged_at[cause] = now
            log.warning("canary_obs: a connection%s was refused: %s", peer, _EXPLANATIONS[cause])


def _admit_own_user(socket: zmq.Socket[bytes]) -> None:
    # The kernel names the user of a Unix socket's peer, whatever the modes of the file and its folder became.
    # Root is admitted, as engines in containers often run as root; it could read our memory anyway.
    for user in sorted({0, os.geteuid()}):
        with contextlib.suppress(zmq.ZMQError):  # a platform without peer credentials; the modes still hold
            socket.setsockopt(zmq.IPC_FILTER_UID, user)


def _refusal_cause(frames: list[bytes]) -> HandshakeCause | None:
    event = parse_monitor_message(frames)
    if event["event"] == zmq.EVENT_ACCEPT_FAILED:
        refused = event["endpoint"].startswith(b"ipc://") and event["value"] not in _SHORTAGES
        return HandshakeCause.OTHER_USER if refused else None
    if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return HandshakeCause.BROKEN_OFF
    return {
        int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): HandshakeCause.SERVICE_KEY,
        int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): HandshakeCause.MECHANISM,
    }.get(int(event["value"]), HandshakeCause.PROTOCOL)


def _receive_waiting(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    for _ in range(MESSAGES_PER_CALL):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield frames
