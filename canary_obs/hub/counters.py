"""Counters: the hub's own, and a rank's across restarts of its engine (earlier lives are added)."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from canary_obs.records import (
    GroupCounters,
    Latencies,
    PatrolProgress,
    PerturbCount,
    PipelineStatus,
    Snapshot,
)
from canary_obs.vocabulary import HandshakeCause

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
    "pipeline",
    "patrol",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubCounts:
    """What the hub did, since its start."""

    messages: dict[str, int]  # by kind
    refused: int  # messages of a superseded process
    undecodable: int  # frames that were not ours
    handshakes: dict[str, int]  # connections refused, by cause
    evicted: int  # violations that made room for newer ones
    faults: dict[str, int]  # by part of the service


class HandshakeCounts:
    """Connections that were not let in. They change no state: who has no key has no hold on the verdict."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[HandshakeCause] = Counter()

    def refused(self, cause: HandshakeCause) -> None:
        """One more."""
        with self._lock:
            self._counts[cause] += 1

    def counts(self) -> dict[str, int]:
        """Every cause, at 0 from the start."""
        with self._lock:
            return {cause.value: self._counts[cause] for cause in HandshakeCause}


def carried_over(snapshot: Snapshot, base: Snapshot | None) -> Snapshot:
    """The snapshot with the totals of the life before it added to every counter; gauges stay its own."""
    if base is None:
        return snapshot
    summed = {name: _plus(getattr(snapshot, name), getattr(base, name)) for name in COUNTER_FIELDS}
    return msgspec.structs.replace(snapshot, **summed)


def _plus(mine: Any, base: Any) -> Any:
    if isinstance(mine, dict):
        both = mine.keys() & base.keys()
        return base | mine | {key: _plus(mine[key], base[key]) for key in both}
    if isinstance(mine, PipelineStatus):
        return msgspec.structs.replace(mine, skipped=mine.skipped + base.skipped)
    if mine is None or base is None:
        return mine
    if isinstance(mine, PatrolProgress):
        return msgspec.structs.replace(mine, cycles=mine.cycles + base.cycles)
    if isinstance(mine, PerturbCount):
        # An injection left open by a dead engine went with its memory; only this life's are open.
        return msgspec.structs.replace(_sum_fields(mine, base), open=mine.open)
    if isinstance(mine, (GroupCounters, Latencies)):
        return _sum_fields(mine, base)
    if isinstance(mine, tuple):
        return tuple(map(_plus, mine, base))
    return mine + base


def _sum_fields(mine: Any, base: Any) -> Any:
    return type(mine)(
        **{name: _plus(getattr(mine, name), getattr(base, name)) for name in mine.__struct_fields__}
    )
