"""A bounded queue in front of an exporter: producers never wait, and every loss is counted.

Why not opentelemetry-sdk's batch processor: as of 1.45 it ignores the result of `export`, so that batches
that the receiver refuses are not counted, and it counts a full queue only in SDK metrics, with a warning per
item. Both counts are metrics of ours (telemetry_exported_total, telemetry_dropped_total).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

log = logging.getLogger("canary_obs")

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCounts:
    """Outcome of the items of one signal so far."""

    exported: int
    queue_full: int
    failed: int  # refused by the receiver, or the exporter raised


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLimits:
    """Sizes in items; `delay` in seconds."""

    queue: int = 2048
    batch: int = 512
    delay: float = 1.0


class ExportQueue(Generic[Item]):
    """A queue and the thread that passes batches to `send`, which returns whether they were delivered."""

    def __init__(self, name: str, send: Callable[[Sequence[Item]], bool], limits: ExportLimits) -> None:
        self._name, self._send, self._limits = name, send, limits
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._exported = self._full = self._failed = 0
        self._thread = threading.Thread(target=self._run, name=f"canary-otlp-{name}", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> ExportCounts:
        """Items exported and lost so far."""
        with self._changed:
            return ExportCounts(exported=self._exported, queue_full=self._full, failed=self._failed)

    def put(self, item: Item) -> None:
        """Queue an item, or count it as lost when the queue is full. Never waits."""
        with self._changed:
            if self._closing or len(self._items) >= self._limits.queue:
                self._full += 1
                return
            self._items.append(item)
            if len(self._items) >= self._limits.batch:
                self._changed.notify()

    def close(self, timeout: float) -> None:
        """Export queued items for up to `timeout` seconds; the rest is counted as lost. Idempotent."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._full += len(self._items)
            self._items.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._closing and len(self._items) < self._limits.batch:
                    self._changed.wait(self._limits.delay)
                count = min(len(self._items), self._limits.batch)
                batch = [self._items.popleft() for _ in range(count)]
                if not batch and self._closing:
                    return
            if batch:
                self._export(batch)

    def _export(self, batch: list[Item]) -> None:
        try:
            delivered = self._send(batch)
        except Exception:  # a failing exporter loses its batch; the thread continues
            if self._failed == 0:
                log.exception("canary_obs: %s cannot be exported", self._name)
            delivered = False
        with self._changed:
            if delivered:
                self._exported += len(batch)
            else:
                self._failed += len(batch)
