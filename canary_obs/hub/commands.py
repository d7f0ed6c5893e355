"""Requests of an operator to the engines, and the errors that refuse them."""

from __future__ import annotations

import msgspec

from canary_obs.errors import CanaryError


class NoEngine(CanaryError):
    """No rank can receive the command; the text names the reason."""


class UnknownGroup(CanaryError):
    """A sweep names groups that no attached rank has."""

    def __init__(self, unknown: list[str], known: list[str]) -> None:
        self.unknown, self.known = unknown, known
        super().__init__(f"no rank has the groups {', '.join(unknown)}; there are: {', '.join(known)}")


class StartSweepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep on all live ranks."""

    groups: tuple[str, ...] = ()  # empty = all
    data: bool = True  # compare bytes too, not only links
    unlocked_only: bool = False
    swa_resident_only: bool = False  # only tokens that the sliding-window group still holds
