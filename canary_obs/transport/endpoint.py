"""Where the service listens: `ipc://PATH` or `tcp://HOST:PORT`, checked before use."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq

from canary_obs.binding import is_loopback
from canary_obs.config import IN_PROCESS, PREFIX, default_endpoint
from canary_obs.errors import ConfigurationError
from canary_obs.transport import wire
from canary_obs.transport.private_folder import make_private_folder

# sun_path of a Unix socket address holds 108 bytes on Linux, 104 on macOS, terminator included.
MAX_PATH_BYTES = 103

# TCP reports nothing when the peer's host loses power or a cable is pulled; heartbeats do.
HEARTBEAT_SECONDS = 2.0
HEARTBEAT_TIMEOUT_SECONDS = 6.0
CONNECT_TIMEOUT_SECONDS = 5.0
# Also how long an engine waits after its key was refused before it connects again.
HANDSHAKE_TIMEOUT_SECONDS = 5.0

_REMEDY = (
    f"Set {PREFIX}ENDPOINT to ipc:///absolute/path.sock, tcp://127.0.0.1:PORT or, with keys, tcp://HOST:PORT."
)

_KEYS_REMEDY = (
    f"For the engine set {PREFIX}ENGINE_SECRET_KEY_FILE and {PREFIX}SERVICE_PUBLIC_KEY_FILE, for the service "
    f"{PREFIX}SERVICE_SECRET_KEY_FILE and {PREFIX}ENGINE_PUBLIC_KEYS_FILE; canary-obs keys FOLDER creates "
    "them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A valid address; `path` is None for TCP."""

    address: str
    path: Path | None


def parse_endpoint(address: str, *, keyed: bool = False) -> Endpoint:
    """Parse and check an address; `keyed` = this side has CURVE keys. Raises ConfigurationError."""
    if address == IN_PROCESS:
        rule = "the in-process link is an object, not an address"
        raise endpoint_error(address, rule, f"Pass a LocalLink to both ends. {_REMEDY}")
    scheme, separator, rest = address.partition("://")
    if separator and scheme == "ipc":
        if keyed:
            rule = "keys are for tcp:// only: a Unix socket is protected by its file mode"
            remedy = f"Set {PREFIX}ENDPOINT to tcp://HOST:PORT, or remove the settings of the key files."
            raise endpoint_error(address, rule, remedy)
        return Endpoint(address=address, path=_socket_path(address, rest))
    if separator and scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise endpoint_error(address, "the port must be 1 to 65535")
        if not host:
            raise endpoint_error(address, "the host is missing")
        if not keyed and not is_loopback(host.strip("[]")):
            rule = "beyond loopback TCP needs keys on both sides"
            raise endpoint_error(address, rule, f"{_KEYS_REMEDY} Or keep both sides on one host. {_REMEDY}")
        return Endpoint(address=address, path=None)
    raise endpoint_error(address, "not an ipc:// or tcp:// address")


def _socket_path(address: str, rest: str) -> Path:
    path = Path(rest)
    if not path.is_absolute() or "\0" in rest or path.name == "":
        raise endpoint_error(address, "the socket path must be absolute")
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        rule = f"the socket path has {len(os.fsencode(path))} bytes, the system allows {MAX_PATH_BYTES}"
        raise endpoint_error(address, rule, f"Choose a shorter path. {_REMEDY}")
    return path


def claim_folder(endpoint: Endpoint) -> None:
    """Create the socket's folder where this user may: whoever makes it first decides who listens there.

    Root leaves folders other than its default one to the service, which may belong to a user. A folder that
    cannot be created is none that another user can create, unless that user may write where this one cannot.
    """
    if endpoint.path is not None and (os.geteuid() or endpoint.address == default_endpoint()):
        with contextlib.suppress(OSError):
            make_private_folder(endpoint.path.parent)


def check_folder_owner(endpoint: Endpoint) -> None:
    """Refuse a socket folder that another user controls; it need not exist. Raises ConfigurationError."""
    if endpoint.path is None:
        return
    folder = endpoint.path.parent
    try:
        status = folder.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise endpoint_error(endpoint.address, f"{folder} cannot be read: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise endpoint_error(endpoint.address, f"{folder} is not a folder")
    user = os.geteuid()
    # Root may use a user's folder that was configured: a privileged engine connects to a user's service.
    trusted = user == 0 and endpoint.address != default_endpoint()
    if not trusted and status.st_uid not in (0, user):
        raise endpoint_error(endpoint.address, f"{folder} belongs to user {status.st_uid}, not to {user}")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        rule = f"{folder} is writable by everyone"
        raise endpoint_error(endpoint.address, rule, f"Run chmod 700 {folder}, or choose another folder.")


def configure_socket(socket: zmq.Socket[bytes], endpoint: Endpoint, queued_messages: int) -> None:
    """Bound the queues and messages of a socket and, over TCP, detect peers that disappeared."""
    socket.setsockopt(zmq.SNDHWM, queued_messages)
    socket.setsockopt(zmq.RCVHWM, queued_messages)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
    if endpoint.path is None:
        socket.setsockopt(zmq.IPV6, "[" in endpoint.address)
        for option, seconds in (
            (zmq.HEARTBEAT_IVL, HEARTBEAT_SECONDS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_SECONDS),
            (zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_SECONDS),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_SECONDS),
        ):
            socket.setsockopt(option, round(seconds * 1000))


def endpoint_error(address: str, rule: str, remedy: str = _REMEDY) -> ConfigurationError:
    """The error for an endpoint that breaks `rule`."""
    return ConfigurationError("endpoint", address, rule, remedy)
