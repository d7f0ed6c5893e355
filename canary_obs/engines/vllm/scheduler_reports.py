"""What the canary does in vLLM's scheduler may fail, and takes time: both are reported."""

from __future__ import annotations

import logging
from typing import Any

SECONDS_ATTRIBUTE = "kv_canary_scheduler_seconds"  # of SchedulerOutput; of Scheduler: spent so far
FAULTS_ATTRIBUTE = "_kv_canary_faults"  # of whoever reports: names of what has failed, each logged once
log = logging.getLogger("canary_obs")


def log_fault(owner: Any, what: str, error: Exception) -> None:
    """Log the first failure of its kind of this owner. Never raises."""
    try:
        known = vars(owner).setdefault(FAULTS_ATTRIBUTE, set())
        if what not in known:
            known.add(what)
            log.error(
                "canary_obs: %s failed in vLLM's scheduler: the workers do not know what it should have "
                "reported to them, and say so; vLLM goes on",
                what, exc_info=error,
            )  # fmt: skip
    except Exception:
        log.exception("canary_obs: %s failed in vLLM's scheduler", what)


class SchedulerSeconds:
    """A worker's view of the time that the canary took in the scheduler since it attached."""

    def __init__(self) -> None:
        self._first: float | None = None

    def note(self, output: Any, overhead: dict[str, float]) -> None:
        """Follow a scheduler output; without its report, the time is unknown and absent."""
        spent = getattr(output, SECONDS_ATTRIBUTE, None)
        if spent is None:
            return
        if self._first is None:
            self._first = spent
        overhead["scheduler"] = spent - self._first
