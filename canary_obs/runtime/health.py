"""The verdict on a rank, from violations, faults, kernel runs, coverage and ages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from canary_kernels import layout
from canary_obs.config import CanaryConfig
from canary_obs.plurals import counted
from canary_obs.records import Acknowledge
from canary_obs.vocabulary import State, worst

PEER_SILENT_SECONDS = 5.0
PIPELINE_STALE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthInputs:
    """What the verdict is made of. Ages in seconds; None = does not apply."""

    armed: bool
    paused: bool
    violations: int
    events_dropped: int
    messages_dropped: int
    peer_age: float | None
    pipeline_lag_seconds: float
    excused_seconds: float = 0.0  # a step lasted so long, and no copy could arrive meanwhile
    coverage: float
    sweep_coverage: float | None
    sweep_error: str | None
    sweep_age: float | None
    patrol_age: float | None


class ReasonSource(Protocol):
    """A check of its own that can keep a rank from OK."""

    def reasons(self) -> list[tuple[State, str]]:
        """What it found by now, each with the state it stands for; empty = nothing. Host data only."""


class Health:
    """Counts the observer's faults and compares launched kernel runs with counted ones."""

    def __init__(self, num_groups: int, config: CanaryConfig) -> None:
        self._config = config
        self.faults: Counter[str] = Counter()
        self.disarmed: str | None = None  # why checks were turned off; None = they were not
        # [groups][NUM_PHASES]
        self.launched_runs = [[0] * layout.NUM_PHASES for _ in range(num_groups)]
        self._expected: dict[int, list[list[int]]] = {}  # runs by sequence of the copy
        self.stalled: set[tuple[int, layout.Phase]] = set()  # (group, phase)
        self._sources: list[ReasonSource] = []
        self._on_acknowledge: list[Callable[[], None]] = []
        self._acknowledged_faults = 0
        self._acknowledged_violations = 0
        self._acknowledged_drops = 0
        self._acknowledged_messages = 0

    def add_source(self, source: ReasonSource, acknowledge: Callable[[], None] | None = None) -> None:
        """Ask `source` for reasons, too, at every verdict; `acknowledge` makes it forget those up to now."""
        self._sources.append(source)
        if acknowledge is not None:
            self._on_acknowledge.append(acknowledge)

    def count_launch(self, group: int, phase: layout.Phase) -> None:
        """Note that a check was launched, which COUNT_RUNS must show."""
        self.launched_runs[group][phase] += 1

    def expect_runs(self, sequence: int) -> None:
        """Note that the counter copy with this sequence must show every run launched so far."""
        self._expected[sequence] = [list(phases) for phases in self.launched_runs]

    def compare_runs(self, sequence: int, runs: Sequence[Sequence[int]]) -> None:
        """Compare the runs in a copy, [groups][NUM_PHASES], with those launched before it.

        A missing run marks the kernel as stalled.
        """
        expected = self._expected.pop(sequence, None)
        if expected is None:
            return
        for skipped in [number for number in self._expected if number < sequence]:
            del self._expected[skipped]  # copies that were never processed
        if runs == expected:
            return
        for group, (wanted, seen) in enumerate(zip(expected, runs, strict=True)):
            for phase in layout.Phase:
                if missing := wanted[phase] - seen[phase]:
                    self.stalled.add((group, phase))
                    self._rebase(group, phase, missing)

    def _rebase(self, group: int, phase: layout.Phase, missing: int) -> None:
        # Report a lost run once; without this every later copy would repeat it.
        for counts in (self.launched_runs, *self._expected.values()):
            counts[group][phase] -= missing

    def acknowledge(self, health_inputs: HealthInputs, seen: Acknowledge) -> None:
        """Leave what was seen out of later verdicts; what happened since stays."""
        before = 0 if seen.undo else self._acknowledged_violations
        self._acknowledged_violations = _seen(seen.violations, health_inputs.violations, before)
        if seen.violations_only:
            return
        self._acknowledged_drops = _seen(
            seen.events_dropped, health_inputs.events_dropped, self._acknowledged_drops
        )
        self._acknowledged_messages = _seen(
            seen.messages_dropped, health_inputs.messages_dropped, self._acknowledged_messages
        )
        self._acknowledged_faults = _seen(seen.faults, self.faults.total(), self._acknowledged_faults)
        self.stalled.clear()
        for acknowledge in self._on_acknowledge:
            acknowledge()

    def verdict(self, health_inputs: HealthInputs) -> tuple[State, tuple[str, ...]]:
        """The rank's state with every reason that keeps it from OK."""
        found: list[tuple[State, str]] = []
        if health_inputs.violations > self._acknowledged_violations:
            count = health_inputs.violations - self._acknowledged_violations
            found.append((State.VIOLATED, f"{counted(count, 'violation')} not acknowledged"))
        found += self._blind_reasons(health_inputs)
        found += self._degraded_reasons(health_inputs)
        for source in self._sources:
            found += source.reasons()
        if not found and not health_inputs.armed:
            found.append((State.OFF, "not ready: mark_ready() was not called yet, or the canary is detached"))
        state = worst([state for state, _ in found]) if found else State.OK
        return state, tuple(reason for _, reason in found)

    def _blind_reasons(self, health_inputs: HealthInputs) -> list[tuple[State, str]]:
        reasons = [
            f"runs of the {phase.name.lower()} kernel of group {group} are missing"
            for group, phase in sorted(self.stalled)
        ]
        if self.disarmed:
            reasons.append(f"checks are off: {self.disarmed}")
        if self.faults.total() > self._acknowledged_faults:
            parts = ", ".join(f"{part} {count}" for part, count in sorted(self.faults.items()))
            reasons.append(f"the observer failed: {parts}")
        if health_inputs.pipeline_lag_seconds > PIPELINE_STALE_SECONDS + health_inputs.excused_seconds:
            reasons.append(f"counters are {health_inputs.pipeline_lag_seconds:.1f} s old")
        return [(State.BLIND, reason) for reason in reasons]

    def _degraded_reasons(self, health_inputs: HealthInputs) -> list[tuple[State, str]]:
        config, reasons = self._config, []
        if health_inputs.events_dropped > self._acknowledged_drops:
            reasons.append(
                f"{counted(health_inputs.events_dropped - self._acknowledged_drops, 'violation row')} dropped"
            )
        if health_inputs.messages_dropped > self._acknowledged_messages:
            dropped = health_inputs.messages_dropped - self._acknowledged_messages
            reasons.append(f"{counted(dropped, 'message')} dropped")
        if health_inputs.peer_age is not None and health_inputs.peer_age > PEER_SILENT_SECONDS:
            reasons.append(
                f"no message from the service at {config.endpoint} for {health_inputs.peer_age:.0f} s"
            )
        if health_inputs.coverage < config.coverage_target:
            reasons.append(
                f"{health_inputs.coverage:.1%} of KV bytes protected, target {config.coverage_target:.1%}"
            )
        if health_inputs.sweep_coverage is not None and health_inputs.sweep_coverage < config.coverage_target:
            reasons.append(f"the last sweep could check {health_inputs.sweep_coverage:.1%} of its slots")
        if health_inputs.sweep_error is not None:
            reasons.append(f"the last sweep failed: {health_inputs.sweep_error}")
        if health_inputs.sweep_age is not None and health_inputs.sweep_age > config.sweep_max_age_seconds:
            reasons.append(f"last completed sweep {health_inputs.sweep_age:.0f} s ago")
        if (
            health_inputs.patrol_age is not None
            and health_inputs.patrol_age > config.patrol_max_cycle_seconds
        ):
            reasons.append(f"oldest byte check {health_inputs.patrol_age:.0f} s ago")
        if health_inputs.paused:
            reasons.append("sweeps and patrol are paused")
        return [(State.DEGRADED, reason) for reason in reasons]


def _seen(count: int | None, now: int, before: int) -> int:
    """How much is acknowledged: never more than there is, never less than before."""
    return now if count is None else max(before, min(count, now))
