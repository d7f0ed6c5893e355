"""Counters: the hub's own, and those of a rank summed over restarts of its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from canary_obs.injection_counts import Latencies, PerturbCount
from canary_obs.records import (
    GroupCounters,
    PatrolProgress,
    PipelineStatus,
    Snapshot,
)

COUNTER_FIELDS = (
    "step",
    "groups",
    "sweep_passes",
    "overhead_seconds",
    "step_seconds",
    "observer_faults",
    "violation_events_dropped",
    "messages_dropped",
    "perturbations",
    "heals",
    "pipeline",
    "patrol",
    "forwards",
    "forwards_checked",
    "tainted_requests",
    "taint_unknown",
    "captures",
    "replays",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubCounts:
    """Counts since the hub's start."""

    messages: dict[str, int]  # by type
    refused: int  # messages of a replaced process
    invalid: dict[str, int]  # messages whose values cannot be, by cause
    undecodable: int  # frames
    handshakes: dict[str, int]  # connections refused, by cause
    evicted: int  # violations dropped for newer ones
    expired: int  # ranks forgotten, long after they left or fell silent
    faults: dict[str, int]  # by part of the service


def add_totals(snapshot: Snapshot, earlier: Snapshot | None) -> Snapshot:
    """The snapshot with the totals before the restart added to its counters; gauges stay as they are."""
    if earlier is None:
        return snapshot
    summed = {name: _add(getattr(snapshot, name), getattr(earlier, name)) for name in COUNTER_FIELDS}
    return msgspec.structs.replace(snapshot, **summed)


def _add(current: Any, earlier: Any) -> Any:
    if isinstance(current, dict):
        both = current.keys() & earlier.keys()
        return earlier | current | {key: _add(current[key], earlier[key]) for key in both}
    if isinstance(current, PipelineStatus):
        return msgspec.structs.replace(current, skipped=current.skipped + earlier.skipped)
    if current is None or earlier is None:  # not reported in one life: the other's count stays
        return earlier if current is None else current
    if isinstance(current, PatrolProgress):
        return msgspec.structs.replace(current, cycles=current.cycles + earlier.cycles)
    if isinstance(current, PerturbCount):
        # An injection left open before the restart went with the engine's memory.
        return msgspec.structs.replace(_add_fields(current, earlier), open=current.open)
    if isinstance(current, (GroupCounters, Latencies)):
        return _add_fields(current, earlier)
    if isinstance(current, tuple):
        return tuple(map(_add, current, earlier))
    return current + earlier


def _add_fields(current: Any, earlier: Any) -> Any:
    return type(current)(
        **{name: _add(getattr(current, name), getattr(earlier, name)) for name in current.__struct_fields__}
    )
