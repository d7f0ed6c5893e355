"""How each metric is read from a rank. A value that is not known yields nothing: absent, never 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from canary_obs.devices.identity import GpuIdentity
from canary_obs.hub.ranks import RankView
from canary_obs.injection_counts import Latencies
from canary_obs.records import GroupCounters, GroupInfo, PatrolProgress, Snapshot
from canary_obs.vocabulary import ObserverPart, Phase, State, SweepStatus

Reading = tuple[tuple[str, ...], float]  # label values, number
Histogram = tuple[tuple[str, ...], Latencies]


def one(value: float | None) -> Iterator[Reading]:
    if value is not None:
        yield (), float(value)


def by_name(values: Mapping[Any, float]) -> Iterator[Reading]:
    for name, value in values.items():
        yield (str(name),), float(value)


def one_hot(current: State) -> Iterator[Reading]:
    for state in State:
        yield (state.value,), float(state is current)


def _groups(rank: RankView) -> Iterable[tuple[str, GroupCounters]]:
    return rank.totals.groups.items() if rank.totals else ()


def _infos(rank: RankView) -> tuple[GroupInfo, ...]:
    return rank.hello.groups if rank.hello else ()


def _patrol(rank: RankView) -> PatrolProgress | None:
    return rank.snapshot.patrol if rank.snapshot else None


def _total(rank: RankView, field: Callable[[Snapshot], float]) -> Iterator[Reading]:
    return one(field(rank.totals) if rank.totals else None)


def _per_phase(rank: RankView, field: Callable[[GroupCounters], Mapping[Phase, int]]) -> Iterator[Reading]:
    for group, counters in _groups(rank):
        for phase, value in field(counters).items():
            yield (group, phase.value), float(value)


def _per_group(rank: RankView, field: Callable[[GroupCounters], int]) -> Iterator[Reading]:
    for group, counters in _groups(rank):
        yield (group,), float(field(counters))


def state(rank: RankView) -> Iterator[Reading]:
    return one_hot(rank.state)


def rank_info(rank: RankView) -> Iterator[Reading]:
    if rank.hello is not None:
        hello = rank.hello
        own = hello.mode.value, hello.backend, hello.engine_version, hello.identity.device
        # An empty label is none: what is unknown is absent.
        gpu = hello.gpu or GpuIdentity(gpu_uuid="")
        yield (*own, hello.model or "", hello.node or "", *msgspec.structs.astuple(gpu)), 1.0


def snapshot_age(rank: RankView) -> Iterator[Reading]:
    return one(rank.snapshot_age)


def clock_skew(rank: RankView) -> Iterator[Reading]:
    return one(rank.clock_skew_seconds)


def step_under_way(rank: RankView) -> Iterator[Reading]:
    return one(rank.step_seconds)


def paused(rank: RankView) -> Iterator[Reading]:
    return one(rank.snapshot.paused if rank.snapshot else None)


def restarts(rank: RankView) -> Iterator[Reading]:
    return one(rank.restarts)


def steps(rank: RankView) -> Iterator[Reading]:
    return _total(rank, lambda totals: totals.step)


def step_seconds(rank: RankView) -> Iterator[Reading]:
    return _total(rank, lambda totals: totals.step_seconds)


def overhead(rank: RankView) -> Iterator[Reading]:
    return by_name(rank.totals.overhead_seconds if rank.totals else {})


def kernel_runs(rank: RankView) -> Iterator[Reading]:
    return _per_phase(rank, lambda counters: counters.runs)


def kernel_healthy(rank: RankView) -> Iterator[Reading]:
    if rank.snapshot is None or rank.snapshot.kernels_stalled is None:
        return
    for group, counters in rank.snapshot.groups.items():
        stalled = rank.snapshot.kernels_stalled.get(group, ())
        for phase in counters.runs:
            yield (group, phase.value), float(phase not in stalled)


def verified(rank: RankView) -> Iterator[Reading]:
    return _per_phase(rank, lambda counters: counters.verified)


def hashed(rank: RankView) -> Iterator[Reading]:
    return _per_phase(rank, lambda counters: counters.hashed)


def bytes_verified(rank: RankView) -> Iterator[Reading]:
    sizes = {info.name: info.protected_slot_bytes for info in _infos(rank)}
    for (group, phase), slots in _per_phase(rank, lambda counters: counters.hashed):
        if group in sizes:
            yield (group, phase), slots * sizes[group]


def unverified(rank: RankView) -> Iterator[Reading]:
    for group, counters in _groups(rank):
        for cause, value in counters.unverified.items():
            yield (group, cause.value), float(value)


def written(rank: RankView) -> Iterator[Reading]:
    return _per_group(rank, lambda counters: counters.written)


def completed(rank: RankView) -> Iterator[Reading]:
    return _per_group(rank, lambda counters: counters.completed)


def violations(rank: RankView) -> Iterator[Reading]:
    for group, counters in _groups(rank):
        for phase, reasons in counters.violations.items():
            for reason, value in reasons.items():
                yield (group, phase.value, reason.value), float(value)


def redetections(rank: RankView) -> Iterator[Reading]:
    for group, counters in _groups(rank):
        for reason, value in counters.redetections.items():
            yield (group, reason.value), float(value)


def events_dropped(rank: RankView) -> Iterator[Reading]:
    return _total(rank, lambda totals: totals.violation_events_dropped)


def sweep_passes(rank: RankView) -> Iterator[Reading]:
    return by_name(rank.totals.sweep_passes if rank.totals else {})


def sweep_running(rank: RankView) -> Iterator[Reading]:
    if rank.snapshot is not None:
        sweep = rank.snapshot.sweep
        yield (), float(sweep is not None and sweep.status is SweepStatus.RUNNING)


def sweep_progress(rank: RankView) -> Iterator[Reading]:
    sweep = rank.snapshot.sweep if rank.snapshot else None
    if sweep is not None:
        done = sweep.checked + sum(sweep.skipped.values())
        yield (), min(1.0, done / sweep.total) if sweep.total else 1.0


def sweep_duration(rank: RankView) -> Iterator[Reading]:
    sweep = rank.snapshot.sweep if rank.snapshot else None
    return one(sweep.seconds if sweep else None)


def last_sweep(rank: RankView) -> Iterator[Reading]:
    ended = rank.snapshot.last_sweep_ns if rank.snapshot else None
    return one(ended / 1e9 if ended else None)


def patrol_progress(rank: RankView) -> Iterator[Reading]:
    patrol = _patrol(rank)
    return one(patrol.progress if patrol else None)


def patrol_cycles(rank: RankView) -> Iterator[Reading]:
    patrol = rank.totals.patrol if rank.totals else None
    return one(patrol.cycles if patrol else None)


def patrol_cycle(rank: RankView) -> Iterator[Reading]:
    patrol = _patrol(rank)
    return one(patrol.cycle_seconds if patrol else None)


def patrol_oldest(rank: RankView) -> Iterator[Reading]:
    patrol = _patrol(rank)
    return one(patrol.oldest_check_seconds if patrol else None)


def patrol_budget(rank: RankView) -> Iterator[Reading]:
    patrol = _patrol(rank)
    return one(patrol.budget_bytes_per_second if patrol else None)


def pool_bytes(rank: RankView) -> Iterator[Reading]:
    return (((info.name,), float(info.slots * info.slot_bytes)) for info in _infos(rank))


def protected_bytes(rank: RankView) -> Iterator[Reading]:
    return (((info.name,), float(info.slots * info.protected_slot_bytes)) for info in _infos(rank))


def allocated_bytes(rank: RankView) -> Iterator[Reading]:
    return one(rank.hello.allocated_bytes if rank.hello else None)


def record_bytes(rank: RankView) -> Iterator[Reading]:
    return one(rank.hello.record_bytes if rank.hello else None)


def lag_steps(rank: RankView) -> Iterator[Reading]:
    return one(rank.snapshot.pipeline.lag_steps if rank.snapshot else None)


def lag_seconds(rank: RankView) -> Iterator[Reading]:
    return one(rank.snapshot.pipeline.lag_seconds if rank.snapshot else None)


def skipped(rank: RankView) -> Iterator[Reading]:
    return one(rank.totals.pipeline.skipped if rank.totals else None)


def swa_diverging(rank: RankView) -> Iterator[Reading]:
    found = rank.snapshot.swa_divergence if rank.snapshot else None
    return one(found.index_divergence if found else None)


def swa_out_of_window(rank: RankView) -> Iterator[Reading]:
    found = rank.snapshot.swa_divergence if rank.snapshot else None
    return one(found.out_of_window if found else None)


def swa_verified(rank: RankView) -> Iterator[Reading]:
    if rank.totals is None or rank.totals.swa_divergence is None:
        return
    found = rank.totals.swa_divergence
    for kind, names in (("full", found.full_groups), ("swa", found.swa_groups)):
        if rank.totals.groups.keys() >= set(names):
            counters = [rank.totals.groups[name].verified for name in names]
            yield (kind,), float(min(verified[Phase.HEAD] + verified[Phase.TAIL] for verified in counters))


def perturbations(rank: RankView) -> Iterator[Reading]:
    for mode, count in (rank.totals.perturbations if rank.totals else {}).items():
        yield (mode.value, "injected"), float(count.injected)
        yield (mode.value, "detected"), float(count.detected)
        yield (mode.value, "masked"), float(count.masked)
        yield (mode.value, "missed"), float(count.missed)


def perturbations_open(rank: RankView) -> Iterator[Reading]:
    for mode, count in (rank.snapshot.perturbations if rank.snapshot else {}).items():
        yield (mode.value,), float(count.open)


def detection_latency(rank: RankView) -> Iterator[Histogram]:
    for mode, count in (rank.totals.perturbations if rank.totals else {}).items():
        yield (mode.value,), count.latency


def observer_faults(rank: RankView) -> Iterator[Reading]:
    if rank.totals is not None:
        # Every part starts at 0: increase() misses a series that is first seen at 1.
        zeros: dict[str, int] = dict.fromkeys(ObserverPart, 0)
        yield from by_name(zeros | rank.totals.observer_faults)


def messages_dropped(rank: RankView) -> Iterator[Reading]:
    return _total(rank, lambda totals: totals.messages_dropped)
