"""Gathers what a rank's verdict weighs, and the snapshot that it sends."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from canary_obs.config import CanaryConfig
from canary_obs.host_clock import boot_id
from canary_obs.records import GroupCounters, PatrolProgress, PipelineStatus, Snapshot, SweepProgress
from canary_obs.runtime.device.counter_reader import CounterReader
from canary_obs.runtime.device.state import DeviceState
from canary_obs.runtime.forward import ForwardChecks
from canary_obs.runtime.forward_account import ForwardAccount
from canary_obs.runtime.healing import Healing
from canary_obs.runtime.health import Health, HealthInputs
from canary_obs.runtime.patrol.patrol import Patrol
from canary_obs.runtime.perturb.injection_log import InjectionLog
from canary_obs.runtime.report.counters import counter_rows, named_counters
from canary_obs.runtime.report.reporter import Reporter
from canary_obs.runtime.report.swa_divergence import SwaReporter
from canary_obs.runtime.run_state import RunState
from canary_obs.runtime.sweep.sweeper import Sweeper
from canary_obs.runtime.taint.report import TaintReporter
from canary_obs.vocabulary import Cause, Phase, State, SweepStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSources:
    """The parts of the runtime that snapshots are read from."""

    config: CanaryConfig
    run: RunState
    state: DeviceState
    health: Health
    counter_reader: CounterReader
    sweeper: Sweeper
    patrol: Patrol
    reporter: Reporter
    swa: SwaReporter
    forwards: ForwardAccount
    checks: ForwardChecks
    taint: TaintReporter
    healing: Healing
    injections: InjectionLog | None  # None = perturbation is off


class SnapshotParts(NamedTuple):
    """What is computed before a snapshot is put together."""

    health_inputs: HealthInputs
    state: State
    reasons: tuple[str, ...]
    groups: dict[str, GroupCounters]
    patrol: PatrolProgress | None
    pipeline: PipelineStatus


def current_health_inputs(sources: SnapshotSources) -> HealthInputs:
    """Everything the verdict weighs, as of now."""
    pipeline = sources.counter_reader.status(sources.run.step, time.monotonic())
    return make_health_inputs(sources, sources.patrol.progress, pipeline)


def make_health_inputs(
    sources: SnapshotSources, patrol: PatrolProgress | None, pipeline: PipelineStatus
) -> HealthInputs:
    """Everything the verdict weighs: `patrol` and `pipeline` as given, the rest as of now."""
    now, run, schedule, config = time.monotonic(), sources.run, sources.sweeper.schedule, sources.config
    last = sources.sweeper.last
    automatic = config.sweep_interval > 0 or config.idle_sweep or config.busy_sweep
    return HealthInputs(
        armed=run.armed,
        paused=run.paused,
        violations=sources.counter_reader.findings(now),
        events_dropped=sources.counter_reader.log.dropped + sources.reporter.dropped_rows,
        messages_dropped=sources.reporter.dropped_messages,
        peer_age=sources.reporter.peer_age(now),
        pipeline_lag_seconds=pipeline.lag_seconds,
        excused_seconds=run.excused_seconds(now),
        coverage=sources.state.coverage,
        sweep_coverage=_sweep_coverage(last) if last else None,
        sweep_error=schedule.error,
        sweep_age=now - (schedule.last_completed or run.ready_at) if run.armed and automatic else None,
        patrol_age=patrol.oldest_check_seconds if run.armed and patrol is not None else None,
    )


def _sweep_coverage(last: SweepProgress) -> float | None:
    """Share of a sweep's slots that were checked, without those evicted meanwhile; None = not completed.

    A slot with a baseline counts as checked: its bytes were, and the rest is not to be had.
    """
    held = last.total - last.skipped[Cause.EVICTED]
    if last.status not in (SweepStatus.PASSED, SweepStatus.VIOLATED) or held <= 0:
        return None
    return (last.checked + last.skipped[Cause.BASELINE]) / held


def group_counters(state: DeviceState, counter_reader: CounterReader) -> dict[str, GroupCounters]:
    """The counters of every group by its name, from the newest host copy."""
    rows = counter_rows(counter_reader.counters.tolist(), counter_reader.side_counters.tolist())
    found = zip(rows, *counter_reader.log.counts(), strict=True)
    return {group.name: named_counters(*row) for group, row in zip(state.groups, found, strict=True)}


def whole_snapshot(sources: SnapshotSources) -> Snapshot:
    """A snapshot as of now, made at once."""
    pipeline = sources.counter_reader.status(sources.run.step, time.monotonic())
    patrol = sources.patrol.progress
    inputs = make_health_inputs(sources, patrol, pipeline)
    groups = group_counters(sources.state, sources.counter_reader)
    parts = SnapshotParts(inputs, *sources.health.verdict(inputs), groups, patrol, pipeline)
    return make_snapshot(sources, parts)


def make_snapshot(sources: SnapshotSources, parts: SnapshotParts) -> Snapshot:
    """A snapshot of the given parts; the rest as of now."""
    inputs, run, stalled = parts.health_inputs, sources.run, sources.health.stalled
    injections, phases = sources.injections, tuple(Phase)
    tainted, unknown = sources.taint.counts()
    replays = sources.checks.replays
    return Snapshot(
        identity=sources.reporter.identity,
        sequence=sources.reporter.next_snapshot_sequence(),
        time_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
        boot_id=boot_id(),
        mode=sources.config.mode,
        backend=sources.state.backend.value,
        step=run.step,
        state=parts.state,
        state_reasons=parts.reasons,
        groups=parts.groups,
        sweep_passes=dict(sources.sweeper.passes),
        last_sweep_ns=sources.sweeper.last_completed_ns,
        sweep=sources.sweeper.progress,
        patrol=parts.patrol,
        pipeline=parts.pipeline,
        overhead_seconds=dict(run.overhead),
        step_seconds=run.step_seconds,
        observer_faults=dict(sources.health.faults),
        violation_events_dropped=inputs.events_dropped,
        messages_dropped=inputs.messages_dropped,
        kernels_stalled={
            name: tuple(phases[phase] for index, phase in stalled if index == group.index)
            for name, group in sources.state.by_name.items()
        }
        if stalled
        else dict.fromkeys(sources.state.by_name, ()),
        perturbations=injections.counts() if injections else {},
        paused=run.paused,
        swa_divergence=sources.swa.latest,
        forwards=sources.forwards.counted,
        healing=sources.healing.status,
        heals=sources.healing.counts,
        forwards_checked=dict(sources.forwards.checked),
        tainted_requests=tainted,
        taint_unknown=unknown,
        captures={"done": replays.captured, "failed": replays.failed} if replays else None,
        replays=replays.replayed if replays else None,
    )
