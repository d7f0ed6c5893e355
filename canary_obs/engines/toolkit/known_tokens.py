"""Puts what a scheduler knows of each request's tokens on the device, in the order of a forward's batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_kernels.forward_start import RING_ROWS, HostColumns, start_forward
from canary_kernels.forward_start.columns import address_of
from canary_kernels.layout import TICK_BITS
from canary_obs.engine_api.launches import ForwardLaunches
from canary_obs.engines.toolkit.later import Later
from canary_obs.runtime.device.backend import choose_backend

Chains = NDArray[np.int64]  # [2, n]: tokens known of each request, and the chain over them; -1 = unknown


class KnownColumns(NamedTuple):
    """The same tensors at each call for as many requests."""

    lens: Tensor  # int64 [n]; tokens that the scheduler knows; -1 = it said nothing
    digests: Tensor  # int64 [n]; the chain over them


class KnownTokens:
    """One rank's side of the comparison of its tokens with the scheduler's."""

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._host = HostColumns.allocate(max_requests, device)
        self._ring = [self._host.row(number) for number in range(RING_ROWS)]
        self._addresses = [0] * RING_ROWS  # as they lie there
        # Of each row, the part for as many requests as the last forward had.
        self._count, self._rooms = 0, list[Chains | None]([None]) * RING_ROWS
        self.rows = (
            self._host.rows
        )  # int64 [max_requests]; a copy of the rows in the last forward's `columns`
        self._views: dict[int, KnownColumns] = {}  # by requests
        self._requests: list[str] = []  # of the forward that is next
        self._given: Tensor | None = None  # its rows
        # For forwards whose columns are needed at once, before the canary's own clock is set.
        self._backend = choose_backend("auto", device)
        self._clock, self._forwards = torch.zeros(1, dtype=torch.int64, device=device), 0
        self._sent_of: list[str] = []  # the requests that `_sent` is of
        self._sent: Chains | None = None
        self._later: Later[Chains] | None = None  # then there is nothing in `_sent` yet
        self._order = _Order([], [])  # of the last batch

    def note(self, scheduled: Iterable[str], sent: Chains | Later[Chains] | None) -> None:
        """The next forward's requests; `sent` of them, in this order, is int64 [2, n]; None = nothing was."""
        if type(sent) is Later:
            self._sent, self._later = None, sent
        else:
            self._sent, self._later = sent, None
        if sent is not None:
            self._sent_of = list(scheduled)

    def begin(self, requests: list[str], rows: Tensor | None = None) -> None:
        """A forward is next; its requests in the order of its batch.

        `rows`: int32 or int64 [n], where the engine makes them anew for each forward.
        """
        self._requests, self._given = requests, rows

    def columns(self, count: int) -> KnownColumns:
        """For a forward of so many requests; filled as it starts."""
        found = self._views.get(count)
        if found is None:
            known = self._host.known
            found = self._views[count] = KnownColumns(known[0, :count], known[1, :count])
        return found

    def launches(
        self, before_write: Callable[[], None] | None = None, head: Callable[[], None] | None = None
    ) -> ForwardLaunches:
        """What fills the columns, and these launches of the same forward."""
        return ForwardLaunches(host=self._host, stage=self.stage, before_write=before_write, head=head)

    def fill(self) -> None:
        """Fill the columns now: what the adapter launches next reads them."""
        self._forwards += 1
        if self._later is not None:
            self._sent, self._later = self._later.get(), None
        self.stage(self._forwards)
        start_forward(self._backend, self._clock, 1 << TICK_BITS, self._host, len(self._requests))

    def stage(self, step: int) -> Callable[[], None] | None:
        """Write the columns of forward number `step` where the device takes them from.

        What it returns writes what is known later, as in ForwardLaunches.
        """
        requests, count = self._requests, len(self._requests)
        number, given = step % RING_ROWS, self._given
        address = 0 if given is None else address_of(given)
        if count != self._count:
            self._count, self._rooms = count, [None] * RING_ROWS
        room = self._rooms[number]
        if room is None:
            room = self._rooms[number] = self._ring[number][1][:, :count]
        # In each step, as a rule the same: each call of NumPy costs some us where caches are cold.
        if address != self._addresses[number]:
            self._ring[number][0][0] = self._addresses[number] = address
        sent, later = self._sent, None
        if self._later is not None:
            later = partial(self._stage_later, self._later, step)
        if sent is None or not self._sent_of:
            room[0] = -1
        else:
            order = self._order
            if order.requests != requests or order.sent != self._sent_of:
                order = self._order = _Order(requests, self._sent_of)
            if order.same:
                room[...] = sent
            else:
                np.take(sent, order.places, axis=1, out=room, mode="clip")
            if order.unknown is not None:  # the scheduler said nothing of these
                room[0, order.unknown] = -1
        return later

    def _stage_later(self, later: Later[Chains], step: int) -> None:
        self._sent, self._later = later.get(), None
        self.stage(step)  # with the same rows: a device that is behind takes them only now


class _Order:
    """Where the requests of a batch are among those that the scheduler sent; the same for many steps."""

    def __init__(self, requests: list[str], sent: list[str]) -> None:
        self.requests, self.sent = requests, sent  # that it was made for
        self.same = requests == sent
        known = dict(zip(sent, range(len(sent)), strict=True))
        self.places = np.array(list(map(known.get, requests, repeat(-1))), dtype=np.intp)
        missing = np.flatnonzero(self.places < 0)
        self.unknown = missing if missing.size else None
