"""What is known of a stored copy, in a file next to it: replaced as a whole, checked before it is believed.

A file is MAGIC, a seal of 16 bytes, then msgpack. The seal is a keyed hash of the rest; without a key it is
a plain one, and the file's owner vouches for it.
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from queue import Full, Queue
from threading import Thread

import msgspec

from canary_obs.errors import ConfigurationError

log = logging.getLogger("canary_obs")
MAGIC = b"kvc1"
_SEAL_BYTES = 16
_SETTING = "copy_records_key_file"
_MAX_FILE_BYTES = 1 << 20
_QUEUED = 4096  # files that wait to be written
_KEY_BYTES = 32, 64
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class RecordFile(msgspec.Struct, frozen=True):
    """The fingerprints of one stored copy: the folds of K and V of its blocks, by group and place in it."""

    key: bytes  # of the copy: one next to another file is not believed
    formats: dict[str, int]  # `Observer.record_format` by group
    folds: dict[str, dict[int, list[tuple[int, int]]]]


def read_key(path: str) -> bytes | None:
    """The key in a file of 32 to 64 bytes; None for no path. Raises ConfigurationError."""
    if not path:
        return None
    try:
        key, mode = Path(path).read_bytes(), Path(path).stat().st_mode
    except OSError as error:
        rule = f"it cannot be read ({error.strerror})"
        raise ConfigurationError(_SETTING, path, rule, "Name a file that this process may read.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        rule = f"its mode is {stat.filemode(mode)}, and only its owner may read it"
        raise ConfigurationError(_SETTING, path, rule, f"Run chmod 600 {path}.")
    if not _KEY_BYTES[0] <= len(key) <= _KEY_BYTES[1]:
        rule = f"it has {len(key)} bytes, and a key has 32 to 64"
        raise ConfigurationError(_SETTING, path, rule, f"Create it with head -c 32 /dev/urandom > {path}.")
    return key


class RecordFiles:
    """Reads record files at once, and writes them in a thread of its own. Refused ones are counted."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key or b""
        self._queue: Queue[tuple[str, RecordFile] | None] = Queue(_QUEUED)
        self._thread = Thread(target=self._write_all, name="canary-copy-records", daemon=True)
        self._thread.start()
        self.refused = 0  # files that were damaged, forged, or somebody else's
        self.unwritten = (
            0  # copies that have none because the queue was full, or the file could not be written
        )

    def close(self, seconds: float = 5.0) -> None:
        """Write what is queued, for at most so long; idempotent."""
        with suppress(Full):
            self._queue.put(None, timeout=seconds)
        self._thread.join(seconds)

    def write(self, path: str, record_file: RecordFile) -> bool:
        """Have a record file written. False = too many wait already: this copy stays without."""
        try:
            self._queue.put_nowait((path, record_file))
        except Full:
            self.unwritten += 1
            return False
        return True

    def read(self, path: str, key: bytes) -> RecordFile | None:
        """What is said of the copy with this key; None = there is none that can be believed."""
        try:
            with Path(path).open("rb") as file:
                owner = os.fstat(file.fileno())
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError:
            return None
        try:
            record_file = self._opened(data, owner)
        except (ValueError, msgspec.DecodeError) as error:
            self._refuse(path, str(error))
            return None
        if record_file.key != key:
            self._refuse(path, "it belongs to another copy")
            return None
        return record_file

    def _opened(self, data: bytes, owner: os.stat_result) -> RecordFile:
        head = len(MAGIC) + _SEAL_BYTES
        if len(data) > _MAX_FILE_BYTES or data[: len(MAGIC)] != MAGIC:
            raise ValueError("it is no record file of this version")
        if not self._key and (owner.st_uid != os.geteuid() or owner.st_mode & _WRITABLE_BY_OTHERS):
            raise ValueError("others may write it, and KV_CANARY_COPY_RECORDS_KEY_FILE is not set")
        if not hmac.compare_digest(data[len(MAGIC) : head], self._seal(data[head:])):
            raise ValueError("its seal does not hold")
        return msgspec.msgpack.decode(data[head:], type=RecordFile)

    def _seal(self, body: bytes) -> bytes:
        return blake2b(body, digest_size=_SEAL_BYTES, key=self._key).digest()

    def _refuse(self, path: str, why: str) -> None:
        if self.refused == 0:
            log.warning("canary_obs: %s is not believed: %s; what it belongs to is unverified", path, why)
        self.refused += 1

    def _write_all(self) -> None:
        while (job := self._queue.get()) is not None:
            path, record_file = job
            try:
                self._write(Path(path), self._merged(path, record_file))
            except OSError as error:
                if self.unwritten == 0:
                    log.warning("canary_obs: %s could not be written: %s", path, error)
                self.unwritten += 1
            self._queue.task_done()

    def _merged(self, path: str, record_file: RecordFile) -> RecordFile:
        """Two engines may have stored the copy at once: either's fingerprints may be those of the file."""
        other = self.read(path, record_file.key)
        if other is None or other.formats != record_file.formats:
            return record_file
        folds = {name: dict(places) for name, places in other.folds.items()}
        for name, places in record_file.folds.items():
            for place, copies in places.items():
                known = folds.setdefault(name, {}).get(place, [])
                folds[name][place] = [*known, *[copy for copy in copies if copy not in known]]
        return msgspec.structs.replace(record_file, folds=folds)

    def _write(self, path: Path, record_file: RecordFile) -> None:
        body = msgspec.msgpack.encode(record_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        descriptor = os.open(scratch, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(MAGIC + self._seal(body) + body)
            scratch.replace(path)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise

    def settle(self) -> None:
        """Wait until everything queued so far is written."""
        if self._thread.is_alive():
            self._queue.join()
