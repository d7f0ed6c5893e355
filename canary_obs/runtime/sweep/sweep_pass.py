"""One sweep under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from canary_obs.engine_api.walks import CachedWalk
from canary_obs.records import StartSweep
from canary_obs.runtime.device.state import Group
from canary_obs.vocabulary import SweepStatus, Trigger


@dataclass(slots=True, kw_only=True)
class SweepPass:
    """What a sweep has to check, and how far it is."""

    command: StartSweep
    trigger: Trigger
    work: list[tuple[Group, CachedWalk]]
    total: int
    started_ns: int
    started: float
    step: int
    groups: tuple[str, ...]
    began_seconds: float = 0.0  # that a step spent on its start; 0 once they were taken from a budget
    next_group: int = 0
    ending: SweepStatus | None = None  # all launched, or cancelled: waiting for the counters
    settles_at: int = -1  # sequence of the first counter copy that holds all of its results
    totals: dict[str, int] = field(default_factory=dict)  # counted so far
    error: str | None = None
