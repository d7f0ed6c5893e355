"""Copies device memory to the host without ever waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MAX_QUERIES = 4


class Event(Protocol):
    """A point in a stream: what is used of torch.Event."""

    def record(self) -> None:
        """Mark the point on the current stream."""

    def query(self) -> bool:
        """Whether the device has passed the point. Never waits."""


class CompletedEvent:
    """Stands for an event on the CPU, where a copy is done when the call returns."""

    def record(self) -> None:
        """Nothing to mark."""

    def query(self) -> bool:
        """Always done."""
        return True


class Sample(NamedTuple):
    """One host copy. It shows everything launched before its push."""

    sequence: int  # ordinal of the push, from 0
    step: int  # forward step at the push
    pushed: float  # time.monotonic() at the push
    words: NDArray[np.int64]  # [n]

    @property
    def values(self) -> Tensor:
        """int64 [n] on the host; shares memory with `words`."""
        return torch.from_numpy(self.words)


@dataclass(slots=True, kw_only=True)
class _Row:
    staging: Tensor  # on the device: a stable copy for the side stream to read
    pinned: Tensor  # on the host
    words: NDArray[np.int64]  # the same memory: NumPy copies a short row in half of torch's time
    event: Event  # recorded after the copy to `pinned`


class _Copy(NamedTuple):
    """A copy in flight, with the fields of its Sample."""

    row: _Row
    sequence: int
    step: int
    pushed: float


class DelayedDeviceHost:
    """A ring of in-flight copies of one int64 tensor: `push` starts a copy, `poll` returns arrived ones.

    `side_stream=False` copies on the current stream of the push, for streams that nothing waits for.
    """

    def __init__(
        self,
        source: Tensor,
        rows: int,
        event_factory: Callable[[], Event] | None = None,
        *,
        side_stream: bool = True,
    ) -> None:
        on_cuda = source.is_cuda
        if event_factory is None:
            event_factory = partial(torch.Event, source.device) if on_cuda else CompletedEvent
        self._source = source
        self._host_source = None if on_cuda else source.numpy()
        # Not torch.cuda's Stream and Event: they determine the device in Python, 10 us each time.
        self._side: torch.Stream | None = None
        if on_cuda and side_stream:
            self._side = torch.Stream(source.device)
            self._staged = torch.Event(source.device)
        pinned = [torch.empty(source.shape, dtype=source.dtype, pin_memory=on_cuda) for _ in range(rows)]
        self._free = deque(
            _Row(
                staging=torch.empty_like(source) if self._side else source,
                pinned=row,
                words=row.numpy(),
                event=event_factory(),
            )
            for row in pinned
        )
        self._in_flight: deque[_Copy] = deque()
        self._arrived_step: int | None = None
        self.pushed = 0
        self.skipped = 0

    @property
    def next_sequence(self) -> int:
        """Sequence of the next successful push."""
        return self.pushed

    def push(self, step: int, now: float) -> bool:
        """Start a copy of the source as of now in stream order; False = ring full, counted in `skipped`."""
        if not self._free:
            self.skipped += 1
            return False
        row = self._free.popleft()
        if self._host_source is not None:
            row.words[:] = self._host_source
            row.event.record()
        elif self._side is None:
            row.pinned.copy_(self._source, non_blocking=True)
            row.event.record()
        else:
            row.staging.copy_(self._source, non_blocking=True)
            self._staged.record()
            self._side.wait_event(self._staged)
            with self._side:
                row.pinned.copy_(row.staging, non_blocking=True)
                row.event.record()
        self._in_flight.append(_Copy(row, self.pushed, step, now))
        self.pushed += 1
        return True

    def poll(self) -> list[Sample]:
        """Copies that have arrived, oldest first. Never waits."""
        samples = []
        while self._in_flight and self._in_flight[0].row.event.query():
            samples.append(self._sample(self._in_flight.popleft()))
        return samples

    def newest(self) -> Sample | None:
        """The newest of the oldest four copies that has arrived; those before it are dropped. None = none.

        Never waits. The limit bounds the cost of a call when a whole ring arrives at once.
        """
        # Not by `poll`: a step of the engine pays for each call, and for each copy that nobody uses.
        newest: _Copy | None = None
        for _ in range(_MAX_QUERIES):
            if not self._in_flight or not self._in_flight[0].row.event.query():
                break
            if newest is not None:
                self._free.append(newest.row)
            newest = self._in_flight.popleft()
        return None if newest is None else self._sample(newest)

    @property
    def full(self) -> bool:
        """Whether a push would be skipped."""
        return not self._free

    @property
    def busy(self) -> bool:
        """Whether copies are in flight."""
        return bool(self._in_flight)

    def lag(self, step: int, now: float) -> tuple[int, float]:
        """Steps and seconds by which the newest host copy trails the engine; 0 when nothing is in flight."""
        if not self._in_flight:
            return 0, 0.0
        oldest = self._in_flight[0]
        arrived = self._arrived_step if self._arrived_step is not None else oldest.step - 1
        return max(step - arrived, 0), now - oldest.pushed

    def flush(self, timeout: float) -> list[Sample]:
        """Poll until everything has arrived or `timeout` seconds have passed."""
        deadline = time.monotonic() + timeout
        samples = self.poll()
        while self._in_flight and time.monotonic() < deadline:
            time.sleep(0.0005)
            samples += self.poll()
        return samples

    def _sample(self, copy: _Copy) -> Sample:
        row, sequence, step, pushed = copy
        words = row.words.copy()
        self._arrived_step = step
        self._free.append(row)
        return Sample(sequence=sequence, step=step, pushed=pushed, words=words)
