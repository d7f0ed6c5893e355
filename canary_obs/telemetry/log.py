"""Log files with one line per violation and per audited write request; a full disk never raises."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from queue import Full, Queue
from typing import Generic, Literal, TextIO, TypeVar

import structlog

from canary_obs.errors import ConfigurationError
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.telemetry.log_text import line_for_people

log = logging.getLogger("canary_obs")

QUEUED_EVENTS = 10_000
LogFormat = Literal["auto", "json", "text"]
Open = Callable[[], TextIO]
OnDrop = Callable[[Exception], None]
Event = TypeVar("Event")
Fields = Mapping[str, str | int | float | None]


class EventLog(Generic[Event]):
    """A bounded queue of events and the thread that writes them: a slow disk delays no caller."""

    def __init__(
        self,
        fields: Callable[[Event], Fields],
        open_file: Open,
        *,
        capacity: int = QUEUED_EVENTS,
        on_drop: OnDrop | None = None,
        for_people: bool = False,
    ) -> None:
        """Lines are JSON unless they are `for_people`."""
        self._fields, self._open, self._on_drop = fields, open_file, on_drop
        self._queue: Queue[Event | None] = Queue(capacity)
        self._drop_lock = threading.Lock()
        self._file: TextIO | None = None
        self.dropped = 0
        self._render = line_for_people if for_people else _json_line
        self._thread = threading.Thread(target=self._run, name=f"canary-log-{fields.__name__}", daemon=True)
        self._thread.start()

    def __call__(self, events: tuple[Event, ...]) -> None:
        """Queue events from any thread; events that find the queue full are counted as dropped."""
        for event in events:
            try:
                self._queue.put_nowait(event)
            except Full as error:
                self._drop(error)

    def close(self) -> None:
        """Write the queued events, then stop; idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._write(event)
            except (OSError, ValueError) as error:
                if self.dropped == 0:
                    log.error("canary_obs: the log cannot be written: %s", error)
                self._drop(error)
                self._reset()
        self._reset()

    def _write(self, event: Event) -> None:
        # Reopened after a failure, so that a rotated file or a disk with space again is used.
        if self._file is None:
            self._file = self._open()
        self._file.write(self._render(self._fields(event)) + "\n")
        self._file.flush()

    def _reset(self) -> None:
        file, self._file = self._file, None
        if file is None or file is sys.stderr:
            return
        try:
            file.close()
        except (OSError, ValueError):
            log.debug("canary_obs: the log could not be closed", exc_info=True)

    def _drop(self, error: Exception) -> None:
        with self._drop_lock:
            self.dropped += 1
        if self._on_drop is not None:
            self._on_drop(error)


def open_log(
    path: str,
    fields: Callable[[Event], Fields],
    on_drop: OnDrop | None = None,
    *,
    log_format: LogFormat = "auto",
) -> EventLog[Event]:
    """Open the file of setting `log_file`; empty = standard error. Raises ConfigurationError.

    `auto` is text where standard error is a terminal and the lines go there, otherwise JSON.
    """
    terminal = path == "" and sys.stderr is not None and sys.stderr.isatty()
    for_people = log_format == "text" or (log_format == "auto" and terminal)
    if path == "":
        return EventLog(fields, lambda: sys.stderr, on_drop=on_drop, for_people=for_people)

    def append() -> TextIO:
        return open(path, "a", encoding="utf-8", opener=_open_private)

    try:
        append().close()
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        remedy = "Name a file in a folder that the service may write, or leave it empty for standard error."
        raise ConfigurationError("log_file", path, rule, remedy) from None
    return EventLog(fields, append, on_drop=on_drop, for_people=for_people)


_JSON = structlog.processors.JSONRenderer(sort_keys=False)


def _json_line(fields: Fields) -> str:
    return str(_JSON(None, "", dict(fields)))


def _open_private(path: str, flags: int) -> int:
    """A new file is for its owner alone; a pipe without a reader is an error, not a wait for one."""
    file = os.open(path, flags | os.O_NONBLOCK, 0o600)
    os.set_blocking(file, True)
    return file


def violation_fields(event: ViolationEvent) -> dict[str, str | int | None]:
    """Fields of a log line. `expected` and `actual` are None where the engine redacted them."""
    identity, row = event.identity, event.violation
    return {
        "event": "kv_cache_violation",
        "timestamp": datetime.fromtimestamp(row.time_ns / 1e9, UTC).isoformat(),
        "level": "error",
        "number": event.number,
        "incident": event.incident,
        "engine": identity.engine,
        "instance": identity.instance,
        "rank": identity.rank,
        "device": identity.device,
        "phase": row.phase.value,
        "reason": row.reason.value,
        "group": row.group,
        "part": row.part.value if row.part else None,
        "step": row.step,
        "ordinal": row.event,
        "slot": row.slot,
        "position": row.position,
        "request": row.request,
        "expected": row.expected,
        "actual": row.actual,
        "lag_steps": row.lag_steps,
        "sweep_id": row.sweep_id,
    }
