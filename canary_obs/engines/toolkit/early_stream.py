"""A third CUDA stream, for work of the next forward that need not wait for the one under way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from canary_obs.engines.toolkit.forward_stream import ForwardStream
from canary_obs.engines.toolkit.side_stream import SideStream, WaitFor

_POOL = 32  # streams of torch, of one priority


class EarlyStream(SideStream):
    """Runs what concerns a step while the device still runs the forward before it.

    Inside its context, launches wait for what the engine's scheduler has launched so far, and for the checks
    of the forward before the one under way. What follows `join` waits for them. On a CPU it does nothing.
    """

    def __init__(
        self,
        device: torch.device,
        scheduler: ForwardStream,
        others: Sequence[ForwardStream | SideStream] = (),
    ) -> None:
        """`others`: streams that it must not be, or it would wait for them: torch hands out 32 in turn."""
        super().__init__(device, enabled=True)
        self._device, self._scheduler, self._others = device, scheduler, others
        self._apart = self._stream is None  # it is known to be none of the others
        if self._stream is not None:
            self._scheduled, self._kept = torch.Event(device), torch.Event(device)
            self._newest, self._before = torch.Event(device), torch.Event(device)

    def checked(self) -> None:
        """The checks of a forward were just launched on the current stream."""
        if self._stream is not None:
            self._newest, self._before = self._before, self._newest
            self._newest.record()

    def kept(self) -> None:
        """What the current stream has launched so far reads what the scheduler changes for its next step."""
        if self._stream is not None:
            self._kept.record()
            self._scheduler.wait(self._kept)

    def __enter__(self) -> None:
        if not self._apart:
            self._keep_apart()
        if self._stream is not None:
            self._scheduler.record(self._scheduled)
            self._stream.wait_event(self._scheduled)
            self._stream.wait_event(self._before)
        self.enter(WaitFor.NOTHING)

    def __exit__(self, *raised: object) -> None:
        self.leave()

    def _keep_apart(self) -> None:
        """Once the engine's streams are known: be none of them."""
        self._apart, theirs = True, {each.stream_id for each in (self._scheduler, *self._others)}
        for _ in range(_POOL):
            if self.stream_id not in theirs:
                return
            self._stream = torch.Stream(self._device)
