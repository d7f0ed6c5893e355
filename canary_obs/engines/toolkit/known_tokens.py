"""Puts what a scheduler knows of each request's tokens on the device, in the order of a forward's batch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# A step's copy to the device has ended before the step after the next one is prepared, so two would do.
_STAGING_BUFFERS = 4


class KnownColumns(NamedTuple):
    """The same tensors at each call for as many requests."""

    lens: Tensor  # int64 [n]; tokens that the scheduler knows; -1 = it said nothing
    digests: Tensor  # int64 [n]; the chain over them


class KnownTokens:
    """One rank's side of the comparison of its tokens with the scheduler's."""

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._columns = torch.full((2, max_requests), -1, dtype=torch.int64, device=device)
        self._views: dict[int, KnownColumns] = {}  # by requests
        pinned = device.type == "cuda"
        staging = [
            torch.zeros((2, max_requests), dtype=torch.int64, pin_memory=pinned)
            for _ in range(_STAGING_BUFFERS)
        ]
        self._staging = cycle([(buffer, buffer.numpy()) for buffer in staging])
        self._sent_of: list[str] = []  # the requests that `_sent` is of
        self._sent: NDArray[np.int64] | None = None
        self._order = _Order([], [])  # of the last batch

    def note(self, scheduled: Iterable[str], sent: NDArray[np.int64] | None) -> None:
        """The next forward's requests; `sent` of them, in this order, is int64 [2, n]; None = nothing was."""
        self._sent = sent
        if sent is not None:
            self._sent_of = list(scheduled)

    def columns(self, requests: list[str]) -> KnownColumns:
        """For the requests of the forward, in the order of its batch; launches a copy, waits for nothing."""
        count = len(requests)
        found = self._views.get(count)
        if found is None:
            found = self._views[count] = KnownColumns(self._columns[0, :count], self._columns[1, :count])
        staging, values = next(self._staging)
        if self._sent is None or not self._sent_of:
            values[0, :count] = -1
        else:
            order = self._order
            if not order.holds(requests, self._sent_of):
                order = self._order = _Order(requests, self._sent_of)
            if order.same:
                values[:, :count] = self._sent
            else:
                np.take(self._sent, order.places, axis=1, out=values[:, :count], mode="clip")
            if order.unknown is not None:  # the scheduler said nothing of these
                values[0, order.unknown] = -1
        self._columns.copy_(staging, non_blocking=True)
        return found


class _Order:
    """Where the requests of a batch are among those that the scheduler sent; the same for many steps."""

    def __init__(self, requests: list[str], sent: list[str]) -> None:
        self._requests, self._sent = requests, sent
        self.same = requests == sent
        known = {request: place for place, request in enumerate(sent)}
        self.places = np.array([known.get(request, -1) for request in requests], dtype=np.intp)
        missing = np.flatnonzero(self.places < 0)
        self.unknown = missing if missing.size else None

    def holds(self, requests: list[str], sent: list[str]) -> bool:
        """Whether it was made for this batch and what is sent now."""
        return self._requests == requests and self._sent == sent
