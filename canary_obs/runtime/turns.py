"""What can wait: on a GPU each part has the host make calls, and an engine step has time for one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import TYPE_CHECKING

from canary_obs.records import Mode
from canary_obs.runtime.faults import Faults
from canary_obs.runtime.obey import obey
from canary_obs.runtime.telling import Telling

if TYPE_CHECKING:
    from canary_obs.runtime.canary import CanaryRuntime

# A step this long has time for one part more; a pause of the engine is no step.
_SECONDS_PER_PART = 0.025
_MOST_PARTS = 12


class Turns:
    """Counters on their way to the host, patrol, snapshots, the service's commands.

    On a GPU every second step moves counters: a copy is started, fetched, looked at. Those in between are
    for the rest. In mode `raise` every step does all three besides, so that the next one can raise.
    """

    def __init__(self, canary: CanaryRuntime, faults: Faults) -> None:
        self._canary, self._faults = canary, faults
        self._telling = Telling(canary)
        self._rotating = canary.state.clock.is_cuda
        self._raising = canary.config.mode is Mode.RAISE
        push, fetch, take = self._push, self._fetch, self._take
        tell, patrol, orders = self._tell_or_patrol, self._patrol, self._obey
        self._cycle: Iterator[Callable[[], object]] = cycle(
            (push, tell, fetch, patrol, take, tell, push, patrol, fetch, tell, take, orders)
            if not self._raising
            else (tell, patrol, tell, orders)
        )

    def step(self, seconds: float) -> None:
        """After an engine step, which took so long."""
        if not self._rotating:
            self.all()
            return
        if self._faults.asked("pump", self._hurried):
            self._move()
        for _ in range(min(1 + int(seconds / _SECONDS_PER_PART), _MOST_PARTS)):
            next(self._cycle)()

    def all(self) -> None:
        """Every part, where nobody waits for calls to the device."""
        self._patrol()
        self._tell()
        self._obey()
        self._move()

    def finish(self) -> None:
        """At rest: a snapshot that was begun, and one more if it is due."""
        self._faults.guard("snapshot", self._telling.finish)

    def sweep(self, seconds: float) -> None:
        """Go on with the sweep that is running, for so long."""
        canary, started = self._canary, time.perf_counter()
        if not self._faults.guard("sweep", canary.sweeper.advance, seconds, canary.pump.next_sequence):
            canary.sweeper.abort("the sweep itself failed; see the engine's log")
        canary.overhead["sweep"] += time.perf_counter() - started

    def _hurried(self) -> bool:
        # Rows of a violation, and what its slot holds, are worth more the sooner they are read.
        return self._raising or self._canary.pump.alarmed

    def _push(self) -> bool:
        return self._faults.guard("pump", self._canary.push_counters)

    def _fetch(self) -> bool:
        return self._faults.guard("pump", self._canary.pump.fetch)

    def _take(self) -> bool:
        return self._faults.guard("pump", self._canary.take_counters)

    def _move(self) -> bool:
        return self._push() and self._fetch() and self._take()

    def _patrol(self) -> None:
        canary = self._canary
        if canary.paused or not canary.patrol.enabled:
            return
        started = time.perf_counter()
        self._faults.guard("patrol", self._advance_patrol)
        canary.overhead["patrol"] += time.perf_counter() - started

    def _advance_patrol(self) -> None:
        resting = self._canary.last_step_end is None
        self._canary.patrol.advance(time.monotonic(), idle=resting)

    def _tell_or_patrol(self) -> None:
        if not self._tell():
            self._patrol()

    def _tell(self) -> bool:
        return self._faults.asked("snapshot", self._telling.advance)

    def _obey(self) -> None:
        self._faults.guard("mailbox", obey, self._canary)
