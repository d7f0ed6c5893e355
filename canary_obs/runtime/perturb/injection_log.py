"""Records the outcome of every injection, and why others were skipped; both are logged."""

from __future__ import annotations

import logging
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from canary_obs.injection_counts import LATENCY_BOUNDS, Latencies, PerturbCount
from canary_obs.records import Violation
from canary_obs.runtime.line_limit import LineLimit
from canary_obs.runtime.perturb.injection import Injection, Outcome
from canary_obs.vocabulary import PerturbMode

log = logging.getLogger("canary_obs")
_SKIP_SECONDS = 10.0  # between lines of skips with the same mode and reason


def _skip_limit() -> LineLimit:
    return LineLimit(1, _SKIP_SECONDS)


@dataclass(slots=True)
class _Tally:
    injected: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    steps: list[int] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    masked: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    missed: list[Injection] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class InjectionLog:
    """Open injections, and statistics of the closed ones and of those that were skipped."""

    def __init__(
        self,
        modes: tuple[PerturbMode, ...],
        rank: str = "",
        skip_limit: Callable[[], LineLimit] = _skip_limit,
    ) -> None:
        """`rank` begins each line of the log; `skip_limit` makes the limit of one mode's and reason's."""
        self._tallies = {mode: _Tally() for mode in modes}
        self._open: list[Injection] = []
        self._rank = f"canary_obs: {rank}: " if rank else "canary_obs: "
        self._limits: dict[tuple[PerturbMode, str], LineLimit] = defaultdict(skip_limit)

    @property
    def open(self) -> tuple[Injection, ...]:
        """Injections without an outcome."""
        return tuple(self._open)

    @property
    def injected(self) -> int:
        """Injections so far, over all modes."""
        return sum(tally.injected for tally in self._tallies.values())

    def holds(self, group: str, slot: int) -> bool:
        """Whether an open injection is in this slot."""
        return any(item.slot == slot and item.group == group for item in self._open)

    def add(self, injection: Injection) -> None:
        """Add an open injection."""
        self._tallies[injection.mode].injected += 1
        self._open.append(injection)
        position = "" if injection.position is None else f", position={injection.position}"
        log.warning(
            "%sfault injected: mode=%s, step=%d, group=%s, slot=%d%s%s",
            self._rank, injection.mode.value, injection.step, injection.group, injection.slot, position,
            f", {injection.detail}" if injection.detail else "",
        )  # fmt: skip

    def skip(self, mode: PerturbMode, group: str, step: int, why: str) -> None:
        """An injection was drawn, and could not be made."""
        self._tallies[mode].skipped[why] += 1
        more = self._limits[mode, why].next_line()
        if more is not None:
            text = "%sno fault injected: mode=%s, step=%d, group=%s: %s%s"
            log.warning(text, self._rank, mode.value, step, group, why, more)

    def match(self, violations: list[Violation]) -> list[Injection]:
        """Close the open injections that these violations detect; returns them."""
        detected = []
        for injection in self.open:
            violation = next((row for row in violations if injection.detected_by(row)), None)
            if violation is not None:
                injection.latency_steps = violation.step - injection.step
                injection.latency_ms = (violation.time_ns - injection.time_ns) / 1e6
                injection.reason = violation.reason
                self.close(injection, Outcome.DETECTED)
                detected.append(injection)
        return detected

    def close(self, injection: Injection, outcome: Outcome, why: str = "") -> None:
        """End an open injection."""
        injection.outcome, injection.why = outcome, why
        self._open.remove(injection)
        tally = self._tallies[injection.mode]
        tally.outcomes[outcome] += 1
        if outcome is Outcome.DETECTED:
            assert injection.latency_steps is not None
            assert injection.latency_ms is not None
            tally.steps.append(injection.latency_steps)
            tally.milliseconds.append(injection.latency_ms)
            tally.latency_counts[bisect_left(LATENCY_BOUNDS, injection.latency_ms / 1e3)] += 1
        elif outcome is Outcome.MASKED:
            tally.masked[why] += 1
        else:
            tally.missed.append(injection)

    def counts(self) -> dict[PerturbMode, PerturbCount]:
        """Counts by mode, for the snapshot."""
        return {
            mode: PerturbCount(
                injected=tally.injected,
                detected=tally.outcomes[Outcome.DETECTED],
                masked=tally.outcomes[Outcome.MASKED],
                missed=tally.outcomes[Outcome.MISSED],
                open=sum(item.mode is mode for item in self._open),
                latency=Latencies(counts=tuple(tally.latency_counts), seconds=sum(tally.milliseconds) / 1e3),
            )
            for mode, tally in self._tallies.items()
        }

    def summary(self) -> dict[str, object]:
        """All statistics by mode, for the demo's JSON."""
        return {
            mode.value: {
                "injected": tally.injected,
                **{
                    outcome.value: tally.outcomes[outcome]
                    for outcome in Outcome
                    if outcome is not Outcome.OPEN
                },
                "open": sum(item.mode is mode for item in self._open),
                "masked_because": dict(tally.masked),
                "missed_slots": [item.slot for item in tally.missed[:20]],
                "skipped": dict(tally.skipped),
                "latency_steps": _median_and_max(tally.steps),
                "latency_ms": _median_and_max(tally.milliseconds),
            }
            for mode, tally in self._tallies.items()
        }


def _median_and_max(values: list[int] | list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": round(statistics.median(values), 3), "max": round(max(values), 3)}
