"""What fails in the observer itself: counted, logged once for each part, and kept from the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from canary_obs.runtime.health import Health
from canary_obs.vocabulary import Mode

log = logging.getLogger("canary_obs")


class Faults:
    """In mode `raise` a fault is counted and passed on."""

    def __init__(self, health: Health, mode: Mode) -> None:
        self._health, self._mode = health, mode

    def guard(self, part: str, call: Callable[..., Any], *arguments: Any) -> bool:
        """Make a call of one part of the observer; False = it failed."""
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - passed on in mode `raise`
            self.met(part, error)
            return False
        return True

    def met(self, part: str, error: Exception) -> None:
        """Count what was caught; in mode `raise` pass it on."""
        self.count(part, error)
        if self._mode is Mode.RAISE:
            raise error

    def count(self, part: str, error: Exception) -> None:
        """A part of the observer, or of the adapter, failed."""
        if self._health.faults[part] == 0:
            log.error("canary_obs: %s failed; serving goes on, the state is blind", part, exc_info=error)
        self._health.faults[part] += 1
