"""Logs changes of the rank's state in the engine's own log, so that they are seen without a service."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

from canary_obs.records import Identity
from canary_obs.vocabulary import State, worst

log = logging.getLogger("canary_obs")
# A change for the better waits so long after the last line: a state that flickers must not fill a disk.
SECONDS_BETWEEN_LINES = 10.0

_NUMBER = re.compile(r"\d+(\.\d+)?((?: [a-z]+){0,2})")  # with its noun: `1 slot`, `2 violation rows`
_LEVELS = {State.DEGRADED: logging.WARNING, State.BLIND: logging.ERROR, State.VIOLATED: logging.ERROR}


def _shape(number: re.Match[str]) -> str:
    return "#" + " ".join(word.removesuffix("s") for word in number[2].split(" "))


class StateLog:
    """One line per change of the state or of its reasons; a changed number in a reason is no change."""

    def __init__(self, identity: Identity, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank = f"rank {identity.rank} of {identity.engine}/{identity.instance}"
        self._clock = clock
        self._state, self._reasons = State.OK, frozenset[str]()  # as logged last
        self._logged_at = float("-inf")

    def update(self, state: State, reasons: tuple[str, ...]) -> None:
        """Log the verdict if it differs from the last line."""
        shapes = frozenset(_NUMBER.sub(_shape, reason) for reason in reasons)
        if (state, shapes) == (self._state, self._reasons):
            return
        worse = state is not self._state and worst([state, self._state]) is state
        if not worse and self._clock() - self._logged_at < SECONDS_BETWEEN_LINES:
            return  # a later call logs it, unless it has changed back
        self._state, self._reasons, self._logged_at = state, shapes, self._clock()
        if state is State.OK:
            # As loud as the line that it ends.
            log.warning("canary_obs: %s is ok again", self._rank)
        else:
            level = _LEVELS.get(state, logging.INFO)
            log.log(level, "canary_obs: %s is %s: %s", self._rank, state.value, "; ".join(reasons))
