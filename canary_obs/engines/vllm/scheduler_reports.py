"""What the canary attaches to a scheduler output, by functions that may fail, and the time that it takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

SECONDS_ATTRIBUTE = "kv_canary_scheduler_seconds"  # of SchedulerOutput; of Scheduler: spent so far
FAULTS_ATTRIBUTE = "_kv_canary_faults"  # of whoever reports: names of what has failed, each logged once
log = logging.getLogger("canary_obs")

Report = Callable[[Any, Any], None]  # of a scheduler and an output


def attach_reports(scheduler: Any, output: Any, reports: Sequence[Report]) -> None:
    """Call each report. What one of them fails to attach is missing in the output, and the workers notice."""
    started = time.perf_counter()
    for report in reports:
        try:
            report(scheduler, output)
        except Exception as error:  # noqa: BLE001 - vLLM's scheduler must go on
            log_fault(scheduler, report.__name__, error)
    held = scheduler.__dict__  # not by `vars` and `setattr`: every step pays for each call
    spent = held.get(SECONDS_ATTRIBUTE, 0.0) + time.perf_counter() - started
    held[SECONDS_ATTRIBUTE] = output.__dict__[SECONDS_ATTRIBUTE] = spent


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
