"""Remembers what a comparison around a load was of, by the clock that its violations are stamped with."""

from __future__ import annotations

import re
from collections import OrderedDict

from canary_obs.vocabulary import UNKNOWN_PEER

PEER_LENGTH = 64
_KEPT = 4096
_NOTHING = (None, None)
_UNUSUAL = re.compile(r"[^A-Za-z0-9._:/@-]")


class Arrivals:
    """On the host alone: the device knows no names. Bounded; of older comparisons nothing is known."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[str, str | None]] = OrderedDict()
        self._before: OrderedDict[int, None] = OrderedDict()  # clocks

    def compared(self, clock: int, peer: str, request: str = "") -> None:
        """The comparison launched at this clock is of bytes from `peer`, for `request`; "" = unknown."""
        self._known[clock] = peer_name(peer), request or None
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def compared_before(self, clock: int) -> None:
        """The comparison launched at this clock is of what a load is about to write over."""
        self._before[clock] = None
        if len(self._before) > _KEPT:
            self._before.popitem(last=False)

    def is_before(self, clock: int) -> bool:
        """Whether what was compared at this clock is what a load has written over since."""
        return clock in self._before

    def peer_of(self, clock: int) -> str | None:
        """Who had sent what was compared at this clock; None = it was no comparison on arrival."""
        return self._known.get(clock, _NOTHING)[0]

    def request_of(self, clock: int) -> str | None:
        """The request that what was compared at this clock is for; None = unknown, or no such comparison."""
        return self._known.get(clock, _NOTHING)[1]


def peer_name(peer: str) -> str:
    """The name as a label: engines choose names, of any length and of any characters."""
    return _UNUSUAL.sub("_", peer)[:PEER_LENGTH] or UNKNOWN_PEER
