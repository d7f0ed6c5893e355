"""Requests of an operator to the engines, and the errors that refuse them."""

from __future__ import annotations

import msgspec

from canary_obs.errors import CanaryError
from canary_obs.hub.rank_selection import EVERY_RANK, RankSelection
from canary_obs.records import StartSweep


class NoEngine(CanaryError):
    """No rank can receive the command; the text names the reason."""


class UnknownGroup(CanaryError):
    """A sweep names groups that no attached rank has."""

    def __init__(self, unknown: list[str], known: list[str]) -> None:
        self.unknown, self.known = unknown, known
        super().__init__(f"no rank has the groups {', '.join(unknown)}; there are: {', '.join(known)}")


class StartSweepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep on the selected ranks: which slots, how deep, how fast, and until when."""

    selection: RankSelection = EVERY_RANK
    groups: tuple[str, ...] = ()  # empty = all
    data: bool = True  # compare bytes too, not only links
    unlocked_only: bool = False
    swa_resident_only: bool = False  # only tokens that the sliding-window group still holds
    used_only: bool = False  # only slots that running requests use
    request: str | None = None  # only slots of this running request
    first_slot: int | None = None
    last_slot: int | None = None
    budget_ms: float | None = None  # per engine step; None = each engine's setting
    deadline_seconds: float | None = None  # from its beginning
    window: str | None = None  # "22:00-05:30" UTC, see SweepWindow

    def command(self, sweep_id: str) -> StartSweep:
        """What each rank is sent."""
        return StartSweep(
            id=sweep_id, groups=self.groups, data=self.data, unlocked_only=self.unlocked_only,
            swa_resident_only=self.swa_resident_only, used_only=self.used_only, request=self.request,
            first_slot=self.first_slot, last_slot=self.last_slot, budget_ms=self.budget_ms,
        )  # fmt: skip
