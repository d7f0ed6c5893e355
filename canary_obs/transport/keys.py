"""CURVE keys: who may speak with whom over TCP. Read from files, made by `canary-obs keys`.

A key file holds lines `KIND KEY`, then anything: who has it, since when. KEY is Z85, 40 characters.
Empty lines and lines that begin with # are skipped.
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

log = logging.getLogger("canary_obs")
MAX_FILE_BYTES = 1 << 20
_KEY_CHARACTERS = 40
_MAKE = "canary-obs keys FOLDER makes all four files."


class KeyKind(StrEnum):
    """Whose key, and which half."""

    SERVICE_SECRET = "service-secret"
    SERVICE_PUBLIC = "service-public"
    ENGINE_SECRET = "engine-secret"
    ENGINE_PUBLIC = "engine-public"

    @property
    def secret(self) -> bool:
        """Whether nobody else may know it."""
        return self in (KeyKind.SERVICE_SECRET, KeyKind.ENGINE_SECRET)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKeys:
    """What an engine needs to speak; Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    service: bytes  # the service's public key


class EngineList:
    """The public keys of a file, read anew when it changes: engines come and go without a restart."""

    def __init__(self, path: str) -> None:
        """Read it. Raises ConfigurationError."""
        self._path = path
        self._stamp = _stamp(path)
        self._keys = self._read()

    def admits(self, key: bytes) -> bool:
        """Whether this key (Z85) is in the file. A file that cannot be used any more changes nothing."""
        stamp = _stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp  # one line per change
            try:
                self._keys = self._read()
                log.warning(
                    "canary_obs: %s has changed; %d engine keys are listed", self._path, len(self._keys)
                )
            except ConfigurationError as error:
                log.error("canary_obs: %s; the %d keys read before stay", error, len(self._keys))
        return key in self._keys

    def _read(self) -> frozenset[bytes]:
        return frozenset(_read("engine_public_keys_file", self._path, KeyKind.ENGINE_PUBLIC))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceKeys:
    """What the service needs to know its engines."""

    secret: bytes = field(repr=False)  # Z85
    engines: EngineList  # who is not in it is refused


def engine_keys(config: CanaryConfig) -> EngineKeys | None:
    """The engine's keys; None when no key file is set. Raises ConfigurationError."""
    own, peer = "engine_secret_key_file", "service_public_key_file"
    if not _both((own, config.engine_secret_key_file), (peer, config.service_public_key_file)):
        return None
    secret = _only(own, config.engine_secret_key_file, KeyKind.ENGINE_SECRET)
    service = _only(peer, config.service_public_key_file, KeyKind.SERVICE_PUBLIC)
    return EngineKeys(public=zmq.curve_public(secret), secret=secret, service=service)


def service_keys(config: ServiceConfig) -> ServiceKeys | None:
    """The service's keys; None when no key file is set. Raises ConfigurationError."""
    own, peers = "service_secret_key_file", "engine_public_keys_file"
    if not _both((own, config.service_secret_key_file), (peers, config.engine_public_keys_file)):
        return None
    secret = _only(own, config.service_secret_key_file, KeyKind.SERVICE_SECRET)
    return ServiceKeys(secret=secret, engines=EngineList(config.engine_public_keys_file))


def make_keys(folder: Path) -> dict[KeyKind, Path]:
    """Write a key pair of the service and one of an engine: secret keys mode 0600, public ones 0644.

    Raises ConfigurationError when a file is there already or cannot be written; then none is left behind.
    """
    _require_curve("folder", folder)
    made: dict[KeyKind, Path] = {}
    pairs = zip(KeyKind, (*reversed(zmq.curve_keypair()), *reversed(zmq.curve_keypair())), strict=True)
    folder_is_new = not folder.exists()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for kind, key in pairs:
            path = folder / kind.value.replace("-", ".")
            _write(path, kind, key)
            made[kind] = path
    except OSError as error:
        for path in made.values():
            path.unlink()
        if folder_is_new:
            with suppress(OSError):
                folder.rmdir()
        rule = f"{error.filename} cannot be made: {error.strerror}"
        remedy = "Name a new folder; keys that are in use are never written over."
        raise ConfigurationError("folder", str(folder), rule, remedy) from None
    return made


def _write(path: Path, kind: KeyKind, key: bytes) -> None:
    mode = 0o600 if kind.secret else 0o644
    line = f"{kind} {key.decode()} made {datetime.now(UTC):%Y-%m-%d} on {platform.node()}\n"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(file, mode)  # whatever the umask
        os.write(file, line.encode())
    except OSError as error:
        path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(file)


def _both(*settings: tuple[str, str]) -> bool:
    """Whether both files are named; one alone is refused."""
    named = [name for name, path in settings if path]
    for name, path in settings:
        if path and len(named) < len(settings):
            missing = next(other for other, empty in settings if not empty)
            remedy = f"Set {PREFIX}{missing.upper()} too, or neither. {_MAKE}"
            raise ConfigurationError(name, path, f"is of no use without {missing}", remedy)
    if named:
        _require_curve(*settings[0])
    return bool(named)


def _require_curve(setting: str, value: object) -> None:
    if not zmq.has("curve"):
        rule = f"this pyzmq ({zmq.__version__}) was built without CURVE"
        raise ConfigurationError(setting, str(value), rule, "Install pyzmq's wheel from PyPI: it has CURVE.")


def _only(setting: str, path: str, kind: KeyKind) -> bytes:
    key, *more = _read(setting, path, kind)
    if more:
        raise ConfigurationError(setting, path, f"holds {1 + len(more)} keys", "Leave exactly one in it.")
    return key


def _read(setting: str, path: str, kind: KeyKind) -> list[bytes]:
    # Neither the text of the file nor a part of it stands in a refusal: it may be a secret.
    found: list[bytes] = []
    for number, (word, key) in _lines(setting, path, secret=kind.secret):
        if word != kind:
            rule = f"line {number} is no {kind} key"
            others = [other for other in KeyKind if other == word]
            rule += f" but one of kind {others[0]}" if others else ""
            raise ConfigurationError(setting, path, rule, f"Write lines like {kind} KEY. {_MAKE}")
        if not _is_key(key):
            rule = f"the key in line {number} is not {_KEY_CHARACTERS} characters of Z85"
            raise ConfigurationError(setting, path, rule, f"Copy the whole line. {_MAKE}")
        found.append(key.encode())
    if not found:
        raise ConfigurationError(setting, path, f"holds no {kind} key", f"Add a line {kind} KEY. {_MAKE}")
    return found


def _lines(setting: str, path: str, *, secret: bool) -> Iterator[tuple[int, tuple[str, str]]]:
    for number, line in enumerate(_text(setting, path, secret=secret).splitlines(), start=1):
        words = line.split(maxsplit=2)
        if words and not words[0].startswith("#"):
            yield number, (words[0], words[1] if len(words) > 1 else "")


def _text(setting: str, path: str, *, secret: bool) -> str:
    try:
        # Without O_NONBLOCK a named pipe would hold up the engine until somebody writes.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check_mode(setting, path, os.fstat(file).st_mode, secret=secret)
            text = os.read(file, MAX_FILE_BYTES + 1)
        finally:
            os.close(file)
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise ConfigurationError(setting, path, rule, f"Name a readable key file. {_MAKE}") from None
    if len(text) > MAX_FILE_BYTES:
        rule = f"is larger than {MAX_FILE_BYTES} bytes"
        raise ConfigurationError(setting, path, rule, f"Name a key file. {_MAKE}")
    return text.decode("ascii", "replace")


def _stamp(path: str) -> tuple[int, ...]:
    """Differs after each change of the file, also when another takes its place; () = not there."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def _check_mode(setting: str, path: str, mode: int, *, secret: bool) -> None:
    if not stat.S_ISREG(mode):
        raise ConfigurationError(setting, path, "is not a file", f"Name a key file. {_MAKE}")
    # Kubernetes gives a pod its secrets as root's files that the pod's group may read: that much is allowed.
    if secret and mode & (stat.S_IRWXO | stat.S_IWGRP):
        rule = f"has mode {stat.S_IMODE(mode):04o}: a secret key that others may read or write is none"
        remedy = f"Run chmod 600 {path}; if others have seen the key, make a new pair."
        raise ConfigurationError(setting, path, rule, remedy)
    if mode & stat.S_IWOTH:
        rule = f"has mode {stat.S_IMODE(mode):04o}: everyone may write keys into it"
        raise ConfigurationError(setting, path, rule, f"Run chmod 644 {path}.")


def _is_key(text: str) -> bool:
    try:
        return len(text) == _KEY_CHARACTERS and len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False
