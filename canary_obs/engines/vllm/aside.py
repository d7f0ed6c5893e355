"""A stream beside the engine's for what follows a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Aside:
    """Work put here runs after all that the engine queued so far, and before what it queues after `join`.

    Between the two lies the sampling of the step, which neither writes KV nor the inputs of the forward.
    """

    def __init__(self, device: torch.device, *, wanted: bool) -> None:
        self._stream: Any = None
        if wanted and device.type == "cuda":
            self._device = device
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._forwarded, self._done = torch.Event(device), torch.Event(device)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is launched inside goes there; on the engine's own stream where there is no other."""
        if self._stream is None:
            yield
            return
        self._forwarded.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._forwarded)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._done.record(self._stream)

    def join(self) -> None:
        """What the current stream gets from now on waits for what was put here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
