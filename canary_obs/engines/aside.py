"""A stream beside the engine's, for what need not be done before the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch


class Behind(Enum):
    """What work put aside waits for, besides what was put there earlier."""

    ALL = "all that the engine's stream has been given so far"
    MARK = "what that had been given at the mark"
    NOTHING = "nothing more"


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
    def entered(self, *, behind: Behind = Behind.ALL) -> Iterator[None]:
        """What is launched inside runs there."""
        if self._stream is None:
            yield
            return
        if behind is Behind.ALL:
            self._queued.record()
            self._stream.wait_event(self._queued)
        elif behind is Behind.MARK:
            self._stream.wait_event(self._marked)
        with self._stream:
            try:
                yield
            finally:
                self._done.record()

    def join(self) -> None:
        """What the current stream gets from now on waits for what was put here."""
        if self._stream is not None:
            self._done.wait()
