"""Chooses the stream of the checks that follow a step's forward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from canary_obs.engines.toolkit.forward_stream import ForwardStream
from canary_obs.engines.toolkit.side_stream import SideStream

STEPS_PER_QUERY = 16  # a query takes 1 to 7 us (docs/performance.md)
_IN_LINE: AbstractContextManager[None] = nullcontext()


class CheckStream:
    """The side stream, or that of the engine, step by step.

    A busy device runs checks on the side stream while it samples, and the engine waits for none of them. A
    device that waits for its host would run them in time on any stream, and two streams cost the host some
    17 us in each step. Forwards of prompts are long: their checks are never in line, and the second step
    after one asks the device anew.
    """

    def __init__(self, forward_stream: ForwardStream, side_stream: SideStream) -> None:
        self._forward_stream, self._side_stream = forward_stream, side_stream
        self._steps = 0  # since the last query
        self._device_waits = False  # it had nothing to do when a step began
        self.in_line = False  # this step's checks
        self.join_due = False  # checks were launched on the side stream

    def begin_step(self, *, few_tokens: bool) -> None:
        """A step begins, on the engine's stream. `few_tokens`: its forward is no longer than a decode's.

        While `join_due`, `join` follows, before anything is launched that the checks must precede.
        """
        self._steps += 1
        if not few_tokens:
            # The device is busy with it when the next step begins, whatever it was before.
            self._steps, self._device_waits, self.in_line = STEPS_PER_QUERY - 2, False, False
            return
        if self._steps >= STEPS_PER_QUERY:
            self._steps, self._device_waits = 0, not self._forward_stream.busy
        self.in_line = self._device_waits

    def join(self) -> None:
        """What the engine's stream runs next waits for what the side stream still does."""
        self.join_due = False
        self._side_stream.join()

    def entered(self) -> AbstractContextManager[None]:
        """Launches inside follow all of the engine's so far."""
        if self.in_line:
            return _IN_LINE
        self.join_due = True
        return self._side_stream.after_all
