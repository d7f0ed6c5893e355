"""Exceptions of the observer itself: counted, logged once per part, and kept from the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from canary_obs.runtime.health import Health
from canary_obs.runtime.run_state import RunState
from canary_obs.vocabulary import Mode, ObserverPart

log = logging.getLogger("canary_obs")


class Faults:
    """In mode `log` a fault ends here; in mode `raise` it is counted and raised again."""

    def __init__(self, health: Health, mode: Mode) -> None:
        self._health, self.mode = health, mode

    def guard(self, part: ObserverPart, call: Callable[..., Any], *arguments: Any) -> bool:
        """Call `call(*arguments)`; an exception counts as a fault of `part`. Returns whether it succeeded."""
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - raised again in mode `raise`
            self.caught(part, error)
            return False
        return True

    def caught(self, part: ObserverPart, error: Exception) -> None:
        """Count a fault; in mode `raise` raise it again."""
        self.count_fault(part, error)
        if self.mode is Mode.RAISE:
            raise error

    def or_disarm(self, run: RunState, recover: Callable[[], object]) -> bool:
        """Call `recover`, without which records would be wrong: if it fails, checks end.

        Returns whether it succeeded and did not return False.
        """
        try:
            return recover() is not False
        except Exception as error:  # noqa: BLE001 - better blind than wrong
            run.armed = False
            self._health.disarmed = f"records could not be adopted after a fault ({type(error).__name__})"
            self.count_fault(ObserverPart.ADOPT, error)
            return False

    def count_fault(self, part: str, error: Exception) -> None:
        """Count a fault of a part of the observer or of the adapter; the first of each part is logged."""
        if self._health.faults[part] == 0:
            log.error(
                "canary_obs: %s failed; the engine keeps serving, the state is blind", part, exc_info=error
            )
        self._health.faults[part] += 1
