"""The counters of one rank over the processes that have reported as it."""

from __future__ import annotations

from canary_obs.hub.counters import add_totals
from canary_obs.records import Snapshot

_KEPT = 8  # processes that may come back; those before are summed up


class Lives:
    """Each process's newest counters count once, even if it comes back after another one.

    It does where clocks are set back, or where two engines share a name.
    """

    def __init__(self) -> None:
        self._ended: dict[int, Snapshot] = {}  # newest snapshot by started_ns, oldest life first
        self._summed: Snapshot | None = None  # of lives that are not kept any more
        self._earlier: Snapshot | None = None  # all of them but the present life
        self._returned: Snapshot | None = None  # of the present life, until it reports again

    def begin(self, started_ns: int, ended_ns: int, newest: Snapshot | None) -> None:
        """Another process reports: `started_ns`; `newest` is what the one before, `ended_ns`, said last."""
        newest = newest or self._returned
        if newest is not None:
            self._ended[ended_ns] = newest
        self._returned = self._ended.pop(started_ns, None)
        while len(self._ended) > _KEPT:
            self._summed = add_totals(self._ended.pop(next(iter(self._ended))), self._summed)
        self._earlier = self._summed
        for snapshot in self._ended.values():
            self._earlier = add_totals(snapshot, self._earlier)

    def newest_of(self, started_ns: int) -> Snapshot | None:
        """What a process said last that does not report at present; None = nothing, or it is not kept."""
        return self._ended.get(started_ns)

    @property
    def returned(self) -> Snapshot | None:
        """What the present process said last, before another one reported between; None = no such."""
        return self._returned

    def totals(self, newest: Snapshot | None) -> Snapshot | None:
        """Counters over all lives; `newest` is the present life's last snapshot. None = none reported."""
        newest = newest or self._returned
        return self._earlier if newest is None else add_totals(newest, self._earlier)
