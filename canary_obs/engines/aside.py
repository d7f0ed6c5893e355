"""A stream beside the engine's, for what need not be done before the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Aside:
    """Work put here is done before what the engine's stream is given after `join`.

    Between entering and joining the engine may do what neither writes KV nor what the work reads:
    its forward ahead of the fingerprints, its sampling.
    """

    def __init__(self, device: torch.device, *, wanted: bool) -> None:
        # Not torch.cuda's Stream and Event: theirs look the device up in Python, 10 us each time.
        self._stream: torch.Stream | None = None
        if wanted and device.type == "cuda":
            self._stream = torch.Stream(device)
            self._marked, self._queued, self._done = (torch.Event(device) for _ in range(3))

    @property
    def used(self) -> bool:
        """Whether there is such a stream; without one all runs on the engine's own."""
        return self._stream is not None

    def mark(self) -> None:
        """Remember this point of the current stream."""
        if self._stream is not None:
            self._marked.record()

    @contextmanager
    def entered(self, *, from_mark: bool = False) -> Iterator[None]:
        """What is launched inside runs there, after all that was queued so far, or up to the mark."""
        if self._stream is None:
            yield
            return
        if not from_mark:
            self._queued.record()
        self._stream.wait_event(self._marked if from_mark else self._queued)
        with self._stream:
            try:
                yield
            finally:
                self._done.record()

    def join(self) -> None:
        """What the current stream gets from now on waits for what was put here."""
        if self._stream is not None:
            self._done.wait()
