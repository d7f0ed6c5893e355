"""A sweep as it is shown: what was asked for, and its progress on each rank."""

from __future__ import annotations

import msgspec

from canary_obs.hub.commands import StartSweepRequest
from canary_obs.records import RankKey, SweepProgress
from canary_obs.vocabulary import SweepStatus, Trigger

SweepVersion = tuple[object, ...]  # see SweepRecord.version


class RankSweep(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's sweep; `progress` is None until the rank reports. Slots per second are of late."""

    key: RankKey
    status: SweepStatus
    progress: SweepProgress | None
    error: str | None
    slots_per_second: float | None = None  # None = unknown, or it does not advance
    eta_seconds: float | None = None  # None = unknown, or it has ended
    process_started_ns: int = 0  # of the process that was asked; 0 = it was not reached


class SweepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep and its progress on each rank. Numbers are sums over ranks; `eta_seconds` is the longest."""

    id: str
    trigger: Trigger
    status: SweepStatus
    groups: tuple[str, ...]  # empty = all
    data: bool
    unlocked_only: bool | None  # None = started by the engine, not reported
    swa_resident_only: bool | None
    requested_ns: int
    ended_ns: int | None
    ranks: tuple[RankSweep, ...]
    traceparent: str | None = None  # W3C: the span that asked for it
    request: StartSweepRequest | None = None  # None = started by the engine
    begun_ns: int | None = None  # when the ranks were asked; None = it waits for its window
    begins_ns: int | None = None  # when its window opens, while it waits
    paused: bool = False  # this sweep, by an operator
    error: str | None = None  # of the sweep itself; ranks have their own
    total: int = 0  # slots
    checked: int = 0
    violations: int = 0
    slots_per_second: float | None = None
    eta_seconds: float | None = None
    ranks_by_status: dict[SweepStatus, int] = {}

    @property
    def version(self) -> SweepVersion:
        """Another one whenever it begins, is paused or resumed, ends, and a rank joins or ends."""
        return self.begun_ns, self.paused, self.ended_ns, *self.ranks_by_status.items()
