"""What can wait: on a GPU each part has the host make calls, and an engine step has time for one of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from canary_obs.runtime.faults import Faults
from canary_obs.runtime.obey import obey
from canary_obs.runtime.telling import Telling

if TYPE_CHECKING:
    from canary_obs.runtime.canary import CanaryRuntime


class Turns:
    """Patrol, snapshots and the service's commands; on a GPU in rotation."""

    def __init__(self, canary: CanaryRuntime, faults: Faults) -> None:
        self._canary, self._faults = canary, faults
        self._telling = Telling(canary)
        self._rotating = canary.state.clock.is_cuda
        # Each says whether it found anything to do; its time counts as that hook's.
        self._parts: deque[tuple[str, Callable[[], bool]]] = deque(
            (("patrol", self._patrol), ("pump", self._tell), ("pump", self._obey))
        )

    def take(self) -> None:
        """Once per step. The part after the one that found something to do is first at the next call."""
        for _ in range(len(self._parts)):
            if self._next() and self._rotating:
                return

    def take_all(self) -> None:
        """At rest: every part, and all of it."""
        for _ in range(len(self._parts)):
            self._next()
        self._faults.guard("snapshot", self._telling.finish)

    def _next(self) -> bool:
        started = time.perf_counter()
        hook, part = self._parts[0]
        self._parts.rotate(-1)
        found = part()
        self._canary.overhead[hook] += time.perf_counter() - started
        return found

    def _patrol(self) -> bool:
        canary = self._canary
        return not canary.paused and self._faults.asked("patrol", self._advance_patrol)

    def _advance_patrol(self) -> bool:
        resting = self._canary.last_step_end is None
        return self._canary.patrol.advance(time.monotonic(), idle=resting)

    def _tell(self) -> bool:
        return self._faults.asked("snapshot", self._telling.advance)

    def _obey(self) -> bool:
        self._faults.guard("mailbox", obey, self._canary)
        return True
