"""Records the outcome of every injection."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum

from canary_obs.injection_counts import LATENCY_BOUNDS, Latencies, PerturbCount
from canary_obs.records import Violation
from canary_obs.vocabulary import PerturbMode, Reason

_BYTES = frozenset({Reason.KV_DATA})
_LINKS = frozenset({Reason.CHAIN, Reason.POSITION, Reason.UNWRITTEN, Reason.TOKEN})


class Outcome(StrEnum):
    """How an injection ended; OPEN = not yet."""

    OPEN = "open"
    DETECTED = "detected"
    MASKED = "masked"
    MISSED = "missed"


@dataclass(slots=True, kw_only=True)
class Injection:
    """One injected fault. Latencies: in steps to the violation, in ms to its arrival on the host."""

    mode: PerturbMode
    group: str
    slot: int  # the slot whose check must fail
    also: frozenset[int] = frozenset()  # or one of these, where a fault shows in adjacent slots too
    step: int
    time_ns: int
    outcome: Outcome = Outcome.OPEN
    why: str = ""  # it was masked or missed
    latency_steps: int | None = None
    latency_ms: float | None = None
    reason: Reason | None = None

    def explains(self, violation: Violation) -> bool:
        """Whether this violation is the detection of this injection."""
        reasons = _LINKS if self.mode is PerturbMode.REQ_TO_TOKEN else _BYTES
        return (
            violation.reason in reasons
            and violation.group == self.group
            and (violation.slot == self.slot or violation.slot in self.also)
            and violation.step >= self.step
        )


@dataclass(slots=True)
class _Tally:
    injected: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    steps: list[int] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    masked: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    missed: list[Injection] = field(default_factory=list)


class InjectionLog:
    """Open injections, and statistics of the closed ones."""

    def __init__(self, modes: tuple[PerturbMode, ...]) -> None:
        self._tallies = {mode: _Tally() for mode in modes}
        self._open: list[Injection] = []

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

    def match(self, violations: list[Violation]) -> list[Injection]:
        """Close the open injections that these violations explain; returns them."""
        detected = []
        for injection in self.open:
            violation = next((row for row in violations if injection.explains(row)), None)
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
                "latency_steps": _median_and_max(tally.steps),
                "latency_ms": _median_and_max(tally.milliseconds),
            }
            for mode, tally in self._tallies.items()
        }


def _median_and_max(values: list[int] | list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": round(statistics.median(values), 3), "max": round(max(values), 3)}
