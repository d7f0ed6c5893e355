"""CURVE keys authenticate engines and the service over TCP. `canary-obs keys` generates them.

A line of a key file is `KIND KEY [COMMENT]`; KEY has 40 characters of Z85. Empty lines and lines that begin
with # are skipped.
"""

from __future__ import annotations

import logging
import os
import platform
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import zmq
from zmq.utils import z85

from canary_obs.config import PREFIX, CanaryConfig, ServiceConfig
from canary_obs.errors import ConfigurationError
from canary_obs.transport.private_folder import make_private_folder

log = logging.getLogger("canary_obs")
MAX_FILE_BYTES = 1 << 20
_KEY_CHARACTERS = 40
_CREATE = "canary-obs keys FOLDER creates all four files."


class KeyKind(StrEnum):
    """The first word of a line: the key's owner, and whether it is the secret or the public key."""

    SERVICE_SECRET = "service-secret"
    SERVICE_PUBLIC = "service-public"
    ENGINE_SECRET = "engine-secret"
    ENGINE_PUBLIC = "engine-public"

    @property
    def secret(self) -> bool:
        """Whether only the owner may know it."""
        return self in (KeyKind.SERVICE_SECRET, KeyKind.ENGINE_SECRET)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKeys:
    """Keys of an engine's end; Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    service: bytes  # the service's public key


class EngineAllowlist:
    """Public keys of the engines that may connect. The file is read again after each change."""

    def __init__(self, path: str) -> None:
        """Read the file. Raises ConfigurationError."""
        self._path = path
        self._version = file_version(path)
        self._keys = self._read()

    def admits(self, key: bytes) -> bool:
        """Whether this key (Z85) is listed. While the file is invalid, the keys read before remain valid."""
        version = file_version(self._path)
        if version != self._version:
            self._version = version  # before reading, so that a bad file is logged once
            try:
                self._keys = self._read()
                log.warning(
                    "canary_obs: %s has changed; %d engine keys are listed", self._path, len(self._keys)
                )
            except ConfigurationError as error:
                log.error("canary_obs: %s; the %d keys read before remain valid", error, len(self._keys))
        return key in self._keys

    def _read(self) -> frozenset[bytes]:
        return frozenset(_read_keys("engine_public_keys_file", self._path, KeyKind.ENGINE_PUBLIC))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceKeys:
    """Keys of the service's end."""

    secret: bytes = field(repr=False)  # Z85
    engines: EngineAllowlist


def engine_keys(config: CanaryConfig) -> EngineKeys | None:
    """The engine's keys; None when no key file is set. Raises ConfigurationError."""
    own, peer = "engine_secret_key_file", "service_public_key_file"
    if not _both_set((own, config.engine_secret_key_file), (peer, config.service_public_key_file)):
        return None
    secret = _read_single_key(own, config.engine_secret_key_file, KeyKind.ENGINE_SECRET)
    service = _read_single_key(peer, config.service_public_key_file, KeyKind.SERVICE_PUBLIC)
    return EngineKeys(public=zmq.curve_public(secret), secret=secret, service=service)


def service_keys(config: ServiceConfig) -> ServiceKeys | None:
    """The service's keys; None when no key file is set. Raises ConfigurationError."""
    own, peers = "service_secret_key_file", "engine_public_keys_file"
    if not _both_set((own, config.service_secret_key_file), (peers, config.engine_public_keys_file)):
        return None
    secret = _read_single_key(own, config.service_secret_key_file, KeyKind.SERVICE_SECRET)
    return ServiceKeys(secret=secret, engines=EngineAllowlist(config.engine_public_keys_file))


def make_keys(folder: Path) -> dict[KeyKind, Path]:
    """Write a key pair for the service and one for an engine: secret keys with mode 0600, public ones 0644.

    Raises ConfigurationError when a file exists or cannot be written, and then leaves no new file.
    """
    _require_curve("folder", folder)
    created: dict[KeyKind, Path] = {}
    pairs = zip(KeyKind, (*reversed(zmq.curve_keypair()), *reversed(zmq.curve_keypair())), strict=True)
    folder_is_new = not folder.exists()
    try:
        make_private_folder(folder)
        for kind, key in pairs:
            path = folder / kind.value.replace("-", ".")
            _write_key(path, kind, key)
            created[kind] = path
    except OSError as error:
        for path in created.values():
            path.unlink()
        if folder_is_new:
            with suppress(OSError):
                folder.rmdir()
        rule = f"{error.filename} cannot be created: {error.strerror}"
        remedy = "Name a new folder; existing keys are never overwritten."
        raise ConfigurationError("folder", str(folder), rule, remedy) from None
    return created


def _write_key(path: Path, kind: KeyKind, key: bytes) -> None:
    mode = 0o600 if kind.secret else 0o644
    line = f"{kind} {key.decode()} made {datetime.now(UTC):%Y-%m-%d} on {platform.node()}\n"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(file, mode)  # open() applies the umask
        os.write(file, line.encode())
    except OSError as error:
        path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(file)


def _both_set(*settings: tuple[str, str]) -> bool:
    """Whether both settings name a file. Raises ConfigurationError when only one does."""
    given = [name for name, path in settings if path]
    for name, path in settings:
        if path and len(given) < len(settings):
            missing = next(other for other, value in settings if not value)
            remedy = f"Set {PREFIX}{missing.upper()} too, or neither of them. {_CREATE}"
            raise ConfigurationError(name, path, f"requires {missing}", remedy)
    if given:
        _require_curve(*settings[0])
    return bool(given)


def _require_curve(setting: str, value: object) -> None:
    if not zmq.has("curve"):
        rule = f"this pyzmq ({zmq.__version__}) was built without CURVE"
        raise ConfigurationError(setting, str(value), rule, "Install pyzmq's wheel from PyPI: it has CURVE.")


def _read_single_key(setting: str, path: str, kind: KeyKind) -> bytes:
    key, *more = _read_keys(setting, path, kind)
    if more:
        raise ConfigurationError(setting, path, f"holds {1 + len(more)} keys", "Leave exactly one in it.")
    return key


def _read_keys(setting: str, path: str, kind: KeyKind) -> list[bytes]:
    # The errors quote nothing from the file: it may be a secret.
    keys: list[bytes] = []
    for number, (word, key) in _key_lines(setting, path, secret=kind.secret):
        if word != kind:
            rule = f"line {number} must be `{kind} KEY`"
            if word in set(KeyKind):
                rule += f", not of kind {word}"
            raise ConfigurationError(setting, path, rule, f"Write lines like {kind} KEY. {_CREATE}")
        if not _is_key(key):
            rule = f"the key in line {number} does not have {_KEY_CHARACTERS} characters of Z85"
            raise ConfigurationError(setting, path, rule, f"Copy the whole line. {_CREATE}")
        keys.append(key.encode())
    if not keys:
        raise ConfigurationError(setting, path, f"holds no {kind} key", f"Add a line {kind} KEY. {_CREATE}")
    return keys


def _key_lines(setting: str, path: str, *, secret: bool) -> Iterator[tuple[int, tuple[str, str]]]:
    for number, line in enumerate(_read_text(setting, path, secret=secret).splitlines(), start=1):
        words = line.split(maxsplit=2)
        if words and not words[0].startswith("#"):
            yield number, (words[0], words[1] if len(words) > 1 else "")


def _read_text(setting: str, path: str, *, secret: bool) -> str:
    try:
        # Without O_NONBLOCK, opening a named pipe would block the engine until another process writes to it.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check_mode(setting, path, os.fstat(file).st_mode, secret=secret)
            text = os.read(file, MAX_FILE_BYTES + 1)
        finally:
            os.close(file)
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise ConfigurationError(setting, path, rule, f"Name a readable key file. {_CREATE}") from None
    if len(text) > MAX_FILE_BYTES:
        rule = f"is larger than {MAX_FILE_BYTES} bytes"
        raise ConfigurationError(setting, path, rule, f"Name a key file. {_CREATE}")
    return text.decode("ascii", "replace")


def file_version(path: str) -> tuple[int, ...]:
    """Changes whenever the file is modified or replaced; () = no file."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _check_mode(setting: str, path: str, mode: int, *, secret: bool) -> None:
    if not stat.S_ISREG(mode):
        raise ConfigurationError(setting, path, "is not a file", f"Name a key file. {_CREATE}")
    # Kubernetes mounts a pod's secrets as files of root that the pod's group may read: that is allowed.
    if secret and mode & (stat.S_IRWXO | stat.S_IWGRP):
        rule = f"has mode {stat.S_IMODE(mode):04o}: others may read or write this secret key"
        remedy = f"Run chmod 600 {path}; if others have seen the key, create a new pair."
        raise ConfigurationError(setting, path, rule, remedy)
    if mode & stat.S_IWOTH:
        rule = f"has mode {stat.S_IMODE(mode):04o}: everyone may add keys to it"
        raise ConfigurationError(setting, path, rule, f"Run chmod 644 {path}.")


def _is_key(text: str) -> bool:
    try:
        return len(text) == _KEY_CHARACTERS and len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False
