"""How old a message is when it arrives, without comparing the wall clocks of two machines."""

from __future__ import annotations

from dataclasses import dataclass

from canary_obs.records import Snapshot

_WINDOW_SECONDS = 60.0  # the least delay of one to two windows is taken for none


@dataclass(slots=True)
class SnapshotClock:
    """Delay of one process's snapshots, and its wall clock's skew. Times in seconds.

    On one host the monotonic clocks of both sides agree. Between hosts they differ by a constant: arrival
    minus sending, at its least, is that constant plus the shortest way, and what exceeds it is delay.
    """

    boot_id: str | None  # of this host
    delay: float = 0.0  # between taking and receiving the newest snapshot
    skew: float | None = None  # its wall clock minus ours; None = no snapshot yet
    _least: float = float("inf")  # arrival minus sending, in this window
    _least_before: float = float("inf")  # in the window before
    _window_ends: float = float("-inf")

    def receive(self, snapshot: Snapshot, now: float, wall_ns: int) -> None:
        """A snapshot arrived; `now` is this side's monotonic clock, `wall_ns` its wall clock."""
        self.delay = self._delay_of(snapshot, now)
        self.skew = (snapshot.time_ns - wall_ns) / 1e9 + self.delay

    def _delay_of(self, snapshot: Snapshot, now: float) -> float:
        if snapshot.monotonic_ns is None:
            return 0.0
        passed = now - snapshot.monotonic_ns / 1e9
        if snapshot.boot_id is not None and snapshot.boot_id == self.boot_id:
            return max(0.0, passed)
        if now >= self._window_ends:
            self._least_before, self._least = self._least, float("inf")
            self._window_ends = now + _WINDOW_SECONDS
        self._least = min(self._least, passed)
        return passed - min(self._least, self._least_before)
