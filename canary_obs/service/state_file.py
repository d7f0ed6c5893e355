"""The file in which operators' sweeps outlive the service."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Literal

import msgspec

from canary_obs.config import PREFIX
from canary_obs.errors import ConfigurationError
from canary_obs.hub.hub import Hub
from canary_obs.hub.sweep_control import SavedSweeps
from canary_obs.vocabulary import State

log = logging.getLogger("canary_obs")

FORMAT: Literal["canary_obs.state/1"] = "canary_obs.state/1"
WRITE_SECONDS = 1.0


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal["canary_obs.state/1"]
    sweeps: SavedSweeps


class StateFile:
    """Read at start; written by a thread of its own, at most once a second and at the end."""

    def __init__(self, path: Path, hub: Hub) -> None:
        """Restore what the file holds. Raises ConfigurationError when it cannot be read or written."""
        self._path, self._hub = path, hub
        self._written: int | None = None  # revision
        self._stop = threading.Event()
        if (content := _read(path)) is not None:
            hub.restore_sweeps(content.sweeps)
        try:
            self._write()
        except OSError as error:
            raise _refused(path, f"cannot be written: {error.strerror}") from None
        self._thread = threading.Thread(target=self._run, name="canary-state", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what has changed; idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            stopped = self._stop.wait(WRITE_SECONDS)
            try:
                self._write()
            except OSError as error:
                self._written = None
                self._hub.fault("state_file", error, State.DEGRADED)
                self._stop.wait(10 * WRITE_SECONDS)
            if stopped:
                return

    def _write(self) -> None:
        revision = self._hub.sweep_control.revision
        if revision == self._written:
            return
        content = _Content(format=FORMAT, sweeps=self._hub.sweep_control.saved())
        new = self._path.with_name(self._path.name + ".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(content))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)
        self._written = revision


def _read(path: Path) -> _Content | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _refused(path, f"is not what this release wrote: {error}") from None


def _refused(path: Path, rule: str) -> ConfigurationError:
    remedy = f"Remove it, or set {PREFIX}STATE_FILE to another file in a folder that the service may write."
    return ConfigurationError("state_file", str(path), rule, remedy)
