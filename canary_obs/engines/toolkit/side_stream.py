"""A stream beside the engine's, for what need not be done before the engine goes on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import Enum

import torch


class WaitFor(Enum):
    """What work put aside waits for, besides what was put there earlier."""

    ALL = "all that the engine's stream has been given so far"
    MARK = "what that had been given at the mark"
    NOTHING = "nothing more"


class _Entry(AbstractContextManager[None]):
    """One way in. Not a generator, and made once: every step of the engine pays for it."""

    def __init__(self, side_stream: SideStream, behind: WaitFor) -> None:
        self._side_stream, self._behind = side_stream, behind

    def __enter__(self) -> None:
        self._side_stream.enter(self._behind)

    def __exit__(self, *raised: object) -> None:
        self._side_stream.leave()


class SideStream:
    """Work put here is done before what the engine's stream is given after `join`.

    `with aside.behind_all:` puts there what is launched inside. Until it joins, the engine may do what
    neither writes KV nor what the work reads: its forward ahead of the fingerprints, its sampling.
    """

    def __init__(self, device: torch.device, *, wanted: bool) -> None:
        # Not torch.cuda's Stream and Event: theirs look the device up in Python, 10 us each time.
        self._stream: torch.Stream | None = None
        if wanted and device.type == "cuda":
            self._stream = torch.Stream(device)
            self._marked, self._queued, self._done = (torch.Event(device) for _ in range(3))
        self.after_all = _Entry(self, WaitFor.ALL)
        self.after_mark = _Entry(self, WaitFor.MARK)
        self.unordered = _Entry(self, WaitFor.NOTHING)

    @property
    def used(self) -> bool:
        """Whether there is such a stream; without one all runs on the engine's own."""
        return self._stream is not None

    def mark(self) -> None:
        """Remember this point of the current stream."""
        if self._stream is not None:
            self._marked.record()

    def enter(self, behind: WaitFor) -> None:
        """From now on launches run there."""
        if self._stream is None:
            return
        if behind is WaitFor.ALL:
            self._queued.record()
            self._stream.wait_event(self._queued)
        elif behind is WaitFor.MARK:
            self._stream.wait_event(self._marked)
        self._stream.__enter__()

    def leave(self) -> None:
        """Back to the stream that was current before."""
        if self._stream is None:
            return
        try:
            self._done.record()
        finally:
            self._stream.__exit__(None, None, None)

    def join(self) -> None:
        """What the current stream gets from now on waits for what was put here."""
        if self._stream is not None:
            self._done.wait()
