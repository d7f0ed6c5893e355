"""Moves device memory to the host without ever waiting for the device."""

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

_MOST_LOOKS = 4


class Event(Protocol):
    """A point in a device's work."""

    def record(self) -> None:
        """Mark the point on the current stream."""

    def query(self) -> bool:
        """Whether the device has passed the point. Never waits."""


class PassedEvent:
    """The CPU's event: its copies are done when the call returns."""

    def record(self) -> None:
        """Nothing to mark."""

    def query(self) -> bool:
        """Always passed."""
        return True


class Sample(NamedTuple):
    """One host copy. Everything launched before its push is in it."""

    sequence: int  # ordinal of the push, from 0
    step: int  # forward step at the push
    pushed: float  # time.monotonic() at the push
    words: NDArray[np.int64]  # [n]

    @property
    def values(self) -> Tensor:
        """int64 [n] on the host: the same memory."""
        return torch.from_numpy(self.words)


@dataclass(slots=True, kw_only=True)
class _Row:
    staging: Tensor  # on the device: a stable copy while the side stream reads it
    pinned: Tensor  # on the host
    words: NDArray[np.int64]  # the same memory: NumPy copies so little in half of torch's time
    event: Event  # the host copy is complete


class _Copy(NamedTuple):
    """One copy under way; the fields are those of its Sample."""

    row: _Row
    sequence: int
    step: int
    pushed: float


class DelayedDeviceHost:
    """A ring of in-flight copies of one int64 tensor; `push` starts one, `poll` takes those that arrived.

    `side_stream=False` copies on the stream of the push: for a stream that nobody waits for.
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
            event_factory = partial(torch.Event, source.device) if on_cuda else PassedEvent
        self._source = source
        self._host_source = None if on_cuda else source.numpy()
        # Not torch.cuda's Stream and Event: theirs look the device up in Python, 10 us each time.
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
            samples.append(self._landed(self._in_flight.popleft()))
        return samples

    def newest(self) -> Sample | None:
        """The newest of the oldest four that has arrived; those before it are dropped. None = nothing new.

        Never waits. At four a call nothing stays behind, and a ring that arrives at once costs no step much.
        """
        # Not by `poll`: a step of the engine pays for each call, and for each copy that nobody looks at.
        newest: _Copy | None = None
        for _ in range(_MOST_LOOKS):
            if not self._in_flight or not self._in_flight[0].row.event.query():
                break
            if newest is not None:
                self._free.append(newest.row)
            newest = self._in_flight.popleft()
        return None if newest is None else self._landed(newest)

    @property
    def full(self) -> bool:
        """Whether a push would be skipped."""
        return not self._free

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return bool(self._in_flight)

    def lag(self, step: int, now: float) -> tuple[int, float]:
        """Steps and seconds the newest host copy trails the engine; 0 when nothing is under way."""
        if not self._in_flight:
            return 0, 0.0
        oldest = self._in_flight[0]
        arrived = self._arrived_step if self._arrived_step is not None else oldest.step - 1
        return max(step - arrived, 0), now - oldest.pushed

    def flush(self, timeout: float) -> list[Sample]:
        """At shutdown: poll until everything arrived or `timeout` seconds passed."""
        deadline = time.monotonic() + timeout
        samples = self.poll()
        while self._in_flight and time.monotonic() < deadline:
            time.sleep(0.0005)
            samples += self.poll()
        return samples

    def _landed(self, copy: _Copy) -> Sample:
        row, sequence, step, pushed = copy
        words = row.words.copy()
        self._arrived_step = step
        self._free.append(row)
        return Sample(sequence=sequence, step=step, pushed=pushed, words=words)
