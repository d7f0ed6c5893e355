"""A Unix socket file: mode 0600 from its creation, at most one live owner, stale files replaced."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from canary_obs.errors import AddressInUse
from canary_obs.transport.endpoint import Endpoint, check_folder_owner, endpoint_error
from canary_obs.transport.private_folder import make_private_folder

_BACKLOG = 128


class SocketFile:
    """A bound, listening socket. Opening raises ConfigurationError, and then leaves no file or descriptor.

    It is AddressInUse while another program listens there.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        assert endpoint.path is not None
        self._address, self._path = endpoint.address, endpoint.path
        self._create_folder()
        check_folder_owner(endpoint)
        self._lock = self._acquire_lock()
        try:
            self._remove_stale_file()
            self._socket = self._bind()
        except BaseException:
            os.close(self._lock)
            raise
        self._inode = self._path.stat().st_ino

    def detach(self) -> int:
        """Return the file descriptor; the caller closes it."""
        return self._socket.detach()

    def close(self) -> None:
        """Remove the file if it is still ours, and release the address; idempotent."""
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        self._socket.close()
        # The lock file stays: removing it would let two owners lock two different files.
        os.close(self._lock)
        self._lock = -1

    def _create_folder(self) -> None:
        folder = self._path.parent
        try:
            make_private_folder(folder)
        except OSError as error:
            rule = f"the folder {folder} cannot be created: {error.strerror}"
            raise endpoint_error(self._address, rule, _folder_remedy(folder)) from None

    def _acquire_lock(self) -> int:
        path = self._path.with_name(self._path.name + ".lock")
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            rule = f"{path} cannot be written: {error.strerror}"
            raise endpoint_error(self._address, rule, _folder_remedy(path.parent)) from None
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            os.close(lock)
            raise endpoint_error(self._address, f"{path} is not a file", f"Remove {path}.")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(lock)
            raise self._in_use(f"process {owner}") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock

    def _remove_stale_file(self) -> None:
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(status.st_mode):
            rule = "a file that is not a socket exists there"
            raise endpoint_error(self._address, rule, f"Move {self._path} away, or choose another endpoint.")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            refused = probe.connect_ex(os.fsencode(self._path)) == errno.ECONNREFUSED
        if not refused:
            raise self._in_use("another program")
        self._path.unlink()

    def _bind(self) -> socket.socket:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # On Linux the file gets the mode of the unbound socket, so it is never wider than 0600, and the
            # process-wide umask stays as it is. Elsewhere fchmod fails and the chmod below sets the mode.
            with contextlib.suppress(OSError):
                os.fchmod(server.fileno(), 0o600)
            server.bind(os.fsencode(self._path))
            self._path.chmod(0o600)
            server.listen(_BACKLOG)
            server.setblocking(False)
        except OSError as error:
            server.close()
            rule = f"{self._path} cannot be bound: {error.strerror}"
            raise endpoint_error(self._address, rule, _folder_remedy(self._path.parent)) from None
        return server

    def _in_use(self, owner: str) -> AddressInUse:
        remedy = f"Stop {owner}, or choose another endpoint."
        return AddressInUse("endpoint", self._address, f"{owner} is listening there", remedy)


def _folder_remedy(folder: Path) -> str:
    return f"Make {folder} a folder that user {os.geteuid()} can write, or choose another endpoint."
