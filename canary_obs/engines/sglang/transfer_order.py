"""When the records of a transfer are read and written, among the forwards and checks of a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from canary_obs.engines.sglang.check_order import CheckOrder
from canary_obs.engines.sglang.request_rows import tokens_written

_CHECKED = "_kv_canary_checked"  # of a request: its last _Checked, of at most two forwards
_EXPECTED = "_kv_canary_expected"  # of a request that is sent: an event after its row was written


class _Checked(NamedTuple):
    """A request's forward, launched with its checks."""

    tokens: int  # of the prompt that are written then
    events: tuple[torch.Event, ...]  # after all checks so far; none on a CPU


class Checks(CheckOrder, Protocol):
    """The checks of an engine, on streams of its device."""

    def record(self, side: torch.Event, line: torch.Event) -> None:
        """The events happen when all checks so far are over, on either stream."""


class TransferOrder:
    """Of a scheduler whose forwards end before they return: nothing is under way."""

    compares_overwritten = True  # whether what a transfer writes over may be compared before

    def ran(self, batch: Any) -> None:
        """A batch was run, and checked."""

    @contextmanager
    def sending(self, request: Any, tokens: int) -> Iterator[Callable[[], None]]:  # noqa: ARG002
        """Launches inside follow the checks of the forwards that wrote these tokens of a request.

        Yields what waits until the launches inside are over.
        """
        yield _nothing

    def expect(self, request: Any) -> None:
        """The request has its row in the request table, and what it is sent may arrive from now on."""

    @contextmanager
    def arrived(self, request: Any) -> Iterator[None]:  # noqa: ARG002
        """Launches inside follow `expect`. Who waits for them does not wait for forwards."""
        yield

    @contextmanager
    def receiving(self, *used: Tensor) -> Iterator[None]:  # noqa: ARG002
        """Launches inside follow all checks so far, and may read these tensors."""
        yield

    def precede(self) -> None:
        """What the engine launches next follows the checks so far."""


class StreamOrder(TransferOrder):
    """Of one whose forwards go on after their launch.

    A server that prefills sends the KV of one forward while the next one runs: its records are read on a
    stream of their own, which waits for the checks of that forward alone, and the host waits for that: what
    sends is not a stream. A server that decodes is sent KV at any time. Slots that it is given are emptied
    behind the forward under way, which may have read them for a request that has ended. Which records have
    come is read on the stream of its own, so that the host does not wait for that forward.
    """

    compares_overwritten = False  # the other server may write at once

    def __init__(self, checks: Checks, device: torch.device) -> None:
        self._checks, self._device = checks, device
        self._stream = torch.Stream(device) if device.type == "cuda" else None

    def ran(self, batch: Any) -> None:
        """A batch was launched, and its checks."""
        events: tuple[torch.Event, ...] = ()
        if self._stream is not None:
            events = side, line = torch.Event(self._device), torch.Event(self._device)
            self._checks.record(side, line)
        for request in batch.reqs:
            tokens, before = tokens_written(request), vars(request).get(_CHECKED, ())
            # One that is computed anew has fewer tokens than before.
            kept = before[-1:] if before and before[-1].tokens < tokens else ()
            vars(request)[_CHECKED] = (*kept, _Checked(tokens, events))

    @contextmanager
    def sending(self, request: Any, tokens: int) -> Iterator[Callable[[], None]]:
        """Launches inside follow the checks of the forwards that wrote these tokens of a request."""
        if (stream := self._stream) is None:
            yield _nothing
            return
        if (forward := forward_of(request, tokens)) is None:
            with self._checks.in_order():
                stream.wait_stream(torch.cuda.current_stream(self._device))
        else:
            for event in forward.events:
                stream.wait_event(event)
        with stream:
            yield stream.synchronize

    def expect(self, request: Any) -> None:
        """The request has its row in the request table, by the current stream."""
        if self._stream is not None:
            vars(request)[_EXPECTED] = event = torch.Event(self._device)
            event.record()

    @contextmanager
    def arrived(self, request: Any) -> Iterator[None]:
        """Launches inside follow `expect`. What has come since is there: no stream brings it."""
        if (stream := self._stream) is None:
            yield
            return
        if (event := vars(request).pop(_EXPECTED, None)) is None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        else:
            stream.wait_event(event)
        with stream:
            yield

    @contextmanager
    def receiving(self, *used: Tensor) -> Iterator[None]:
        """Launches inside follow all checks so far, and may read these tensors."""
        with self._checks.in_order():
            for tensor in used:
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(self._device))
            yield

    def precede(self) -> None:
        """What the engine launches next follows the checks so far."""
        self._checks.precede()


def forward_of(request: Any, tokens: int) -> _Checked | None:
    """Of a request's last two, the first after which these tokens are written; None = neither."""
    checked: tuple[_Checked, ...] = vars(request).get(_CHECKED, ())
    return next((one for one in checked if one.tokens >= tokens), None)


def _nothing() -> None:
    """What was launched is over."""
