"""A second CUDA stream, for checks that the engine's stream need not wait for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import Enum

import torch


class WaitFor(Enum):
    """What work on the side stream waits for, besides earlier work there."""

    ALL = "all launches on the current stream so far"
    MARK = "launches on the current stream before the last `mark`"
    NOTHING = "no launches on the current stream"


class _Entry(AbstractContextManager[None]):
    """One of SideStream's contexts. Not a generator, and made once: every step of the engine enters some."""

    def __init__(self, side_stream: SideStream, wait_for: WaitFor) -> None:
        self._side_stream, self._wait_for = side_stream, wait_for

    def __enter__(self) -> None:
        self._side_stream.enter(self._wait_for)

    def __exit__(self, *raised: object) -> None:
        self._side_stream.leave()


class SideStream:
    """Runs checks concurrently with the engine's stream; what follows a `join` there waits for them.

    Launch inside one of the contexts `after_all`, `after_mark` and `unordered`, named for what the work waits
    for. Until `join` the engine's stream must not change what the checks read, such as KV or input tensors.
    Without `enabled`, and on a CPU, the contexts do nothing: all work runs on the current stream.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        # torch.cuda's Stream and Event look up the device in Python, 10 us each time; these do not.
        self._stream: torch.Stream | None = None
        if enabled and device.type == "cuda":
            self._stream = torch.Stream(device)
            self._marked, self._launched, self._done = (torch.Event(device) for _ in range(3))
        self.entries = 0  # how often something was launched on it
        self.after_all = _Entry(self, WaitFor.ALL)
        self.after_mark = _Entry(self, WaitFor.MARK)
        self.unordered = _Entry(self, WaitFor.NOTHING)

    @property
    def enabled(self) -> bool:
        """Whether there is a second stream."""
        return self._stream is not None

    @property
    def stream_id(self) -> int | None:
        """By torch; None = there is none."""
        return None if self._stream is None else int(self._stream.stream_id)

    def mark(self) -> None:
        """Record this point of the current stream for `after_mark`."""
        if self._stream is not None:
            self._marked.record()

    def launched(self) -> None:
        """Record this point of the current stream for `wait_launched`."""
        if self._stream is not None:
            self._launched.record()

    def wait_launched(self) -> None:
        """Inside a context: what follows there waits for the last `launched`. Sooner than `after_all`."""
        if self._stream is not None:
            self._stream.wait_event(self._launched)

    def record(self, event: torch.Event) -> None:
        """The event happens when what was launched on the side stream so far is over."""
        if self._stream is not None:
            event.record(self._stream)

    def enter(self, wait_for: WaitFor) -> None:
        """Make the side stream the current one."""
        self.entries += 1
        if self._stream is None:
            return
        if wait_for is WaitFor.ALL:
            self._launched.record()
            self._stream.wait_event(self._launched)
        elif wait_for is WaitFor.MARK:
            self._stream.wait_event(self._marked)
        self._stream.__enter__()

    def leave(self) -> None:
        """Make the stream current that was current before `enter`."""
        if self._stream is None:
            return
        try:
            self._done.record()
        finally:
            self._stream.__exit__(None, None, None)

    def join(self) -> None:
        """Later launches on the current stream wait for all work on the side stream."""
        if self._stream is not None:
            self._done.wait()
