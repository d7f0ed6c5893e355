"""Where the service listens: `ipc://PATH` or `tcp://HOST:PORT`, checked before use."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq

from canary_obs.config import IN_PROCESS, PREFIX, is_loopback
from canary_obs.errors import ConfigurationError
from canary_obs.transport import wire

# sun_path of a Unix socket address holds 108 bytes on Linux, 104 on macOS, terminator included.
MAX_PATH_BYTES = 103

# A peer that vanishes without a word (its host lost power, a cable was pulled) is given up after this long.
HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 6.0
CONNECT_SECONDS = 5.0
# Also how long a connection is held whose key is refused: the engine tries again after that.
HANDSHAKE_SECONDS = 5.0

_REMEDY = (
    f"Set {PREFIX}ENDPOINT to ipc:///absolute/path.sock, tcp://127.0.0.1:PORT or, with keys, tcp://HOST:PORT."
)

_KEYS_REMEDY = (
    f"For the engine set {PREFIX}ENGINE_SECRET_KEY_FILE and {PREFIX}SERVICE_PUBLIC_KEY_FILE, for the service "
    f"{PREFIX}SERVICE_SECRET_KEY_FILE and {PREFIX}ENGINE_PUBLIC_KEYS_FILE; canary-obs keys FOLDER makes them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An address both sides can use; `path` is None for TCP."""

    address: str
    path: Path | None


def parse_endpoint(address: str, *, keyed: bool = False) -> Endpoint:
    """A checked endpoint; `keyed` = this side has CURVE keys. Raises ConfigurationError."""
    if address == IN_PROCESS:
        rule = "the in-process link is an object, not an address"
        raise refusal(address, rule, f"Pass a LocalLink to both ends. {_REMEDY}")
    scheme, separator, rest = address.partition("://")
    if separator and scheme == "ipc":
        if keyed:
            rule = "keys are for tcp:// only: a Unix socket asks for none, its file mode keeps others out"
            remedy = f"Set {PREFIX}ENDPOINT to tcp://HOST:PORT, or leave the settings of the key files out."
            raise refusal(address, rule, remedy)
        return Endpoint(address=address, path=_socket_path(address, rest))
    if separator and scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise refusal(address, "the port must be 1 to 65535", _REMEDY)
        if not host:
            raise refusal(address, "no host is named", _REMEDY)
        if not keyed and not is_loopback(host.strip("[]")):
            rule = "beyond loopback TCP needs keys on both sides"
            raise refusal(address, rule, f"{_KEYS_REMEDY} Or keep both sides on one host. {_REMEDY}")
        return Endpoint(address=address, path=None)
    raise refusal(address, "not an ipc:// or tcp:// address", _REMEDY)


def _socket_path(address: str, rest: str) -> Path:
    path = Path(rest)
    if not path.is_absolute() or "\0" in rest or path.name == "":
        raise refusal(address, "the socket path must be absolute", _REMEDY)
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        rule = f"the socket path has {len(os.fsencode(path))} bytes, the system allows {MAX_PATH_BYTES}"
        raise refusal(address, rule, f"Choose a shorter path. {_REMEDY}")
    return path


def check_owner(endpoint: Endpoint) -> None:
    """Refuse a socket folder that another user controls; a missing folder is fine."""
    if endpoint.path is None:
        return
    folder = endpoint.path.parent
    try:
        found = folder.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise refusal(endpoint.address, f"{folder} cannot be read: {error.strerror}", _REMEDY) from None
    if not stat.S_ISDIR(found.st_mode):
        raise refusal(endpoint.address, f"{folder} is not a folder", _REMEDY)
    me = os.geteuid()
    # Root may look into anyone's folder: that is how a privileged engine meets a user's service.
    if me not in (0, found.st_uid) and found.st_uid != 0:
        raise refusal(endpoint.address, f"{folder} belongs to user {found.st_uid}, not to {me}", _REMEDY)
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        rule = f"{folder} may be written by everyone"
        raise refusal(endpoint.address, rule, f"Run chmod 700 {folder}, or choose another folder.")


def tune(socket: zmq.Socket[bytes], endpoint: Endpoint, queued_messages: int) -> None:
    """Bound a socket's queues and messages, and over TCP how long a silent peer is believed in."""
    socket.setsockopt(zmq.SNDHWM, queued_messages)
    socket.setsockopt(zmq.RCVHWM, queued_messages)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
    if endpoint.path is None:
        socket.setsockopt(zmq.IPV6, "[" in endpoint.address)
        for option, seconds in (
            (zmq.HEARTBEAT_IVL, HEARTBEAT_SECONDS),
            (zmq.HEARTBEAT_TIMEOUT, SILENCE_SECONDS),
            (zmq.CONNECT_TIMEOUT, CONNECT_SECONDS),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_SECONDS),
        ):
            socket.setsockopt(option, round(seconds * 1000))


def refusal(address: str, rule: str, remedy: str = _REMEDY) -> ConfigurationError:
    """The error for an endpoint that breaks a rule."""
    return ConfigurationError("endpoint", address, rule, remedy)
