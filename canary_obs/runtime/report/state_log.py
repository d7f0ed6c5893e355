"""The rank's state in the engine's own log: seen also by who has no service, or one that hears nothing."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

from canary_obs.records import Identity
from canary_obs.vocabulary import State, worst

log = logging.getLogger("canary_obs")
# What is no worse than the line before waits so long: a state that flickers must not fill a disk.
SECONDS_BETWEEN_LINES = 10.0

_NUMBER = re.compile(r"\d+(\.\d+)?")
_LEVELS = {State.DEGRADED: logging.WARNING, State.BLIND: logging.ERROR, State.VIOLATED: logging.ERROR}


class StateLog:
    """One line when the state or a reason of it changes; numbers within a reason do not count as a change."""

    def __init__(self, who: Identity, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank, self._clock = f"rank {who.rank} of {who.engine}/{who.instance}", clock
        self._state, self._reasons = State.OK, frozenset[str]()
        self._told = float("-inf")

    def tell(self, state: State, reasons: tuple[str, ...]) -> None:
        """What the verdict is now."""
        kinds = frozenset(_NUMBER.sub("#", reason) for reason in reasons)
        if (state, kinds) == (self._state, self._reasons):
            return
        worse = state is not self._state and worst([state, self._state]) is state
        if not worse and self._clock() - self._told < SECONDS_BETWEEN_LINES:
            return  # still so at a later turn: then it is told
        self._state, self._reasons, self._told = state, kinds, self._clock()
        if state is State.OK:
            # No less loud than what it ends.
            log.warning("canary_obs: %s is ok again", self._rank)
        else:
            level = _LEVELS.get(state, logging.INFO)
            log.log(level, "canary_obs: %s is %s: %s", self._rank, state.value, "; ".join(reasons))
