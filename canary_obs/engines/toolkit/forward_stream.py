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
        self.unknown = device.type == "cuda"  # until `remember` is called

    def remember(self) -> None:
        """The current stream is the one that runs a forward; called before every forward, or the first."""
        if self.unknown:
            self._stream, self.unknown = torch.cuda.current_stream(self._device), False

    @property
    def busy(self) -> bool:
        """Whether work is left on the stream."""
        return self._stream is not None and not self._stream.query()

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
