"""Names the incident that a rank's findings belong to, before a service has heard of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from canary_obs.incident_names import NAMES_KEPT, new_name

QUIET_SECONDS = 60.0  # the default of KV_CANARY_INCIDENT_QUIET_SECONDS, which is a setting of the service


class IncidentNamer:
    """Findings that follow each other have one name; after a quiet time, or an acknowledgement, a new one.

    The service keeps the name of the rank that reports first, and finds the incident under the others too.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._clock, self._wall_ns = clock, wall_ns
        self._names: deque[str] = deque(maxlen=NAMES_KEPT)
        self._latest = float("-inf")  # finding or redetection; -inf = none since the acknowledgement

    @property
    def names(self) -> tuple[str, ...]:
        """The names given last, the newest at the end."""
        return tuple(self._names)

    def found(self) -> str:
        """The name for findings that are read now."""
        now = self._clock()
        if now - self._latest > QUIET_SECONDS:
            self._names.append(new_name(self._wall_ns()))
        self._latest = now
        return self._names[-1]

    def seen_again(self) -> None:
        """What was found before was met again: the incident goes on."""
        now = self._clock()
        if now - self._latest <= QUIET_SECONDS:
            self._latest = now

    def acknowledged(self) -> None:
        """The incident is closed: findings from now on belong to another."""
        self._latest = float("-inf")
