"""A CUDA stream of an engine, for what launches work after the engine's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from canary_obs.engines.toolkit.side_stream import SideStream


class ForwardStream:
    """Remembers a stream, that on which forwards run. On a CPU there is none, and nothing is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        # Launches inside are on the stream; made once, and before the first `remember` on the current stream.
        self.on_stream: AbstractContextManager[Any] = nullcontext()
        self.unknown = device.type == "cuda"  # until `remember` is called

    def remember(self) -> None:
        """The current stream is the one that runs a forward; called before every forward, or the first."""
        if self.unknown:
            self._stream, self.unknown = torch.cuda.current_stream(self._device), False
            self.on_stream = torch.cuda.stream(self._stream)

    @property
    def stream_id(self) -> int | None:
        """By torch; None = there is none, or it is not known yet."""
        return None if self._stream is None else int(self._stream.stream_id)

    @property
    def busy(self) -> bool:
        """Whether work is left on the stream."""
        return self._stream is not None and not self._stream.query()

    def record(self, event: torch.Event) -> None:
        """The event happens when what was launched on the stream so far is over."""
        if self._stream is not None:
            event.record(self._stream)

    def wait(self, event: torch.Event) -> None:
        """What is launched on the stream next waits for the event."""
        if self._stream is not None:
            event.wait(self._stream)

    def join(self) -> None:
        """What is launched next on the current stream waits for all work on this one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def entered(self) -> AbstractContextManager[object]:
        """Launches inside are on the stream; before the first `remember`, on the current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def context(self, side_stream: SideStream) -> AbstractContextManager[object]:
        """Launches inside wait for all earlier work of the forwards' stream and the side stream."""
        return nullcontext() if self._device.type == "cpu" else self._entered(side_stream)

    @contextmanager
    def _entered(self, side_stream: SideStream) -> Iterator[None]:
        # The current device of a new thread is the first GPU. Before the first forward there is no stream,
        # and torch.cuda.stream(None) does nothing.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            side_stream.join()
            yield
