"""How far a rank's sweep and patrol are, as plain Python structures."""

from __future__ import annotations

import msgspec

from canary_obs.vocabulary import Cause, SweepStatus, Trigger


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class SweepShare(_Struct, frozen=True, kw_only=True):
    """One group's share of a rank's sweep. Seconds count from the sweep's start."""

    group: str
    total: int
    checked: int
    violations: int
    began: float
    ended: float


class SweepProgress(_Struct, frozen=True, kw_only=True):
    """One rank's sweep. Counts are slots; seconds are wall time since its start."""

    id: str
    trigger: Trigger
    status: SweepStatus
    groups: tuple[str, ...]
    data: bool
    total: int
    checked: int
    skipped: dict[Cause, int]
    violations: int
    started_ns: int
    seconds: float
    step: int
    error: str | None = None
    shares: tuple[SweepShare, ...] = ()  # of the groups begun so far
    paused: bool = False  # this sweep, or the rank's sweeps and patrol


class PatrolProgress(_Struct, frozen=True, kw_only=True):
    """Progress of one rank's patrol."""

    progress: float  # 0 to 1 of the current cycle
    cycles: int
    cycle_seconds: float | None  # last complete cycle; None before the first
    oldest_check_seconds: float
    budget_bytes_per_second: float
