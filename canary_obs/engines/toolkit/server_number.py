"""Numbers the servers of one user on one host, so that two with default settings do not collide."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from pathlib import Path

import msgspec

from canary_obs.config import DEFAULT_PORT, IN_PROCESS, CanaryConfig, ServiceConfig, default_endpoint, load
from canary_obs.errors import ConfigurationError
from canary_obs.transport.private_folder import make_private_folder

MOST_SERVERS = 64
_WAIT_SECONDS, _POLL_SECONDS = 2.0, 0.01
_DEFAULT_INSTANCE = "default"

log = logging.getLogger("canary_obs")


class NumberTable:
    """The numbers that are in use, as locked files. A lock ends with its process, however it died."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[tuple[str, str], int] = {}

    def number_of(self, server: str, part: str = "") -> int:
        """The smallest number, from 1 on, that no other running server has; kept until this process ends.

        `server`: a name that all processes of one server share, and only they. `part`: for servers that are
        started one by one and yet report as one instance (data-parallel ranks behind a load balancer of their
        own): each part counts by itself. Raises OSError where the folder cannot be used or no number is left.
        """
        if (known := self._held.get((server, part))) is not None:
            return known
        make_private_folder(self._folder)
        guard = self._open("servers.lock")
        try:
            _wait_for(guard)
            number = self._claim(server, part)
        finally:
            os.close(guard)
        self._held[server, part] = number
        return number

    def _claim(self, server: str, part: str) -> int:
        names = {number: f"server-{number}{part}.lock" for number in range(1, MOST_SERVERS + 1)}
        for number in names:
            if (self._folder / names[number]).exists() and self._join(names[number], server):
                return number
        for number in names:
            file = self._open(names[number])
            if _lock(file, fcntl.LOCK_EX):
                os.ftruncate(file, 0)
                os.pwrite(file, server.encode(), 0)
                fcntl.flock(file, fcntl.LOCK_SH)  # nobody can lock it in between: `servers.lock` is held
                return number
            os.close(file)
        raise OSError(errno.EUSERS, f"{MOST_SERVERS} servers of this user are running on this host")

    def _join(self, name: str, server: str) -> bool:
        """Each process of a server holds a shared lock on the file that has the server's name."""
        file = self._open(name)
        if os.pread(file, 256, 0).decode(errors="replace") == server and _lock(file, fcntl.LOCK_SH):
            return True
        os.close(file)
        return False

    def _open(self, name: str) -> int:
        # Python's descriptors are not inherited: the service that this process starts may outlive it.
        return os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(guard: int) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not _lock(guard, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            raise OSError(errno.EAGAIN, "another process is holding servers.lock")
        time.sleep(_POLL_SECONDS)


_numbers: dict[Path, NumberTable] = {}


def separate(config: CanaryConfig, server: str, part: str = "") -> tuple[CanaryConfig, int | None]:
    """`config` and the port of its service (None = KV_CANARY_PORT's), as no other server has them.

    The first server keeps the defaults. The second is instance `default-2`; if it starts a service, that has
    the next socket and port. Whatever was set stays as it is.
    """
    if config.instance != _DEFAULT_INSTANCE or config.endpoint == IN_PROCESS:
        return config, None
    socket = Path(default_endpoint().removeprefix("ipc://"))
    try:
        number = _numbers.setdefault(socket.parent, NumberTable(socket.parent)).number_of(server, part)
    except OSError as error:
        log.warning(
            "canary_obs: it is unknown whether another server of this user runs on this host (%s); with more "
            "than one, set KV_CANARY_INSTANCE, KV_CANARY_ENDPOINT and KV_CANARY_PORT for each.", error,
        )  # fmt: skip
        return config, None
    if number == 1:
        return config, None
    instance, port = f"{_DEFAULT_INSTANCE}-{number}", None
    config = msgspec.structs.replace(config, instance=instance)
    if config.serve == "auto" and config.endpoint == default_endpoint():
        endpoint = f"ipc://{socket.with_stem(f'{socket.stem}-{number}')}"
        config = msgspec.structs.replace(config, endpoint=endpoint)
        port = DEFAULT_PORT + number - 1 if _port_is_default() else None
    if config.rank == 0:
        log.warning(
            "canary_obs: another server of this user runs on this host: this one reports as instance %s "
            "to %s%s.",
            instance, config.endpoint, "" if port is None else f", whose service has port {port}",
        )  # fmt: skip
    return config, port


def _port_is_default() -> bool:
    try:
        return load(ServiceConfig).port == DEFAULT_PORT
    except ConfigurationError:  # the service itself reports it
        return False
