"""What a rank says about itself: the vitals its verdict weighs, and the snapshot it sends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from canary_obs.records import GroupCounters, PatrolProgress, PipelineStatus, Snapshot, SweepProgress
from canary_obs.runtime.device.violation_log import PHASES
from canary_obs.runtime.health import HealthInputs
from canary_obs.runtime.report.reporter import counter_rows, named_counters
from canary_obs.vocabulary import Cause, State, SweepStatus

if TYPE_CHECKING:
    from canary_obs.runtime.canary import CanaryRuntime


def current_health_inputs(canary: CanaryRuntime) -> HealthInputs:
    """Everything the verdict weighs, as of now."""
    return make_health_inputs(
        canary, canary.patrol.progress, canary.counter_reader.status(canary.step, time.monotonic())
    )


def make_health_inputs(
    canary: CanaryRuntime, patrol: PatrolProgress | None, pipeline: PipelineStatus
) -> HealthInputs:
    """The same, these two as given."""
    now, sweeper, config = time.monotonic(), canary.sweeper, canary.config
    last = sweeper.last
    sweeps_expected = canary.armed and (config.sweep_interval > 0 or config.idle_sweep)
    return HealthInputs(
        armed=canary.armed,
        paused=canary.paused,
        violations=canary.counter_reader.violations,
        events_dropped=canary.counter_reader.log.dropped + canary.reporter.dropped_rows,
        messages_dropped=canary.reporter.dropped_messages,
        peer_age=canary.reporter.peer_age(now),
        pipeline_lag_seconds=pipeline.lag_seconds,
        coverage=canary.state.coverage,
        sweep_coverage=_covered(last) if last else None,
        sweep_error=last.error if last and last.status is SweepStatus.FAILED else None,
        sweep_age=now - (sweeper.last_completed or canary.ready_at) if sweeps_expected else None,
        patrol_age=patrol.oldest_check_seconds if canary.armed and patrol is not None else None,
    )


def _covered(last: SweepProgress) -> float | None:
    """Share of the slots a finished sweep could check, of those that were still there; None = not a pass."""
    held = last.total - last.skipped[Cause.EVICTED]
    if last.status not in (SweepStatus.PASSED, SweepStatus.VIOLATED) or held <= 0:
        return None
    return last.checked / held


def counters_of(canary: CanaryRuntime) -> dict[str, GroupCounters]:
    """The counters of every group, as the newest host copy has them."""
    rows = counter_rows(canary.counter_reader.counted.tolist(), canary.counter_reader.beside.tolist())
    return {group.name: named_counters(row) for group, row in zip(canary.state.groups, rows, strict=True)}


def whole_snapshot(canary: CanaryRuntime) -> Snapshot:
    """Everything the service is told, as of now."""
    patrol, pipeline = canary.patrol.progress, canary.counter_reader.status(canary.step, time.monotonic())
    health_inputs = make_health_inputs(canary, patrol, pipeline)
    told = SnapshotParts(
        health_inputs, *canary.health.verdict(health_inputs), counters_of(canary), patrol, pipeline
    )
    return snapshot_of(canary, told)


class SnapshotParts(NamedTuple):
    """What a snapshot is made of beforehand."""

    health_inputs: HealthInputs
    state: State
    reasons: tuple[str, ...]
    groups: dict[str, GroupCounters]
    patrol: PatrolProgress | None
    pipeline: PipelineStatus


def snapshot_of(canary: CanaryRuntime, told: SnapshotParts) -> Snapshot:
    """Everything the service is told: what is given, and the rest as of now."""
    health_inputs, stalled = told.health_inputs, canary.health.stalled
    return Snapshot(
        identity=canary.reporter.identity,
        sequence=canary.reporter.next_sequence(),
        time_ns=time.time_ns(),
        mode=canary.config.mode,
        backend=canary.state.backend.value,
        step=canary.step,
        state=told.state,
        state_reasons=told.reasons,
        groups=told.groups,
        sweep_passes=dict(canary.sweeper.passes),
        last_sweep_ns=canary.sweeper.last_completed_ns,
        sweep=canary.sweeper.progress,
        patrol=told.patrol,
        pipeline=told.pipeline,
        overhead_seconds=dict(canary.overhead),
        step_seconds=canary.step_seconds,
        observer_faults=dict(canary.health.faults),
        violation_events_dropped=health_inputs.events_dropped,
        messages_dropped=health_inputs.messages_dropped,
        kernels_stalled={
            name: tuple(PHASES[phase] for index, phase in stalled if index == group.index)
            for name, group in canary.state.by_name.items()
        }
        if stalled
        else dict.fromkeys(canary.state.by_name, ()),
        perturbations=canary.injector.injections.counts() if canary.injector else {},
        paused=canary.paused,
        swa_divergence=canary.swa.latest,
    )
