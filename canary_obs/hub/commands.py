"""What an operator may ask of the engines, and why it may be refused."""

from __future__ import annotations

import msgspec

from canary_obs.errors import CanaryError


class NoEngine(CanaryError):
    """No engine can take the command; the text says why."""


class UnknownGroup(CanaryError):
    """A sweep asked for groups that no attached rank has."""

    def __init__(self, unknown: list[str], known: list[str]) -> None:
        self.unknown, self.known = unknown, known
        super().__init__(f"no rank has the groups {', '.join(unknown)}; there are: {', '.join(known)}")


class OrderEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An order that somebody with a token gave, and what came of it: for the audit log."""

    time_ns: int  # when it arrived
    method: str
    route: str  # with the names of its parameters
    path: str
    scope: str  # that it needs
    token: str | None  # the token's name, never the token; None = none is asked for
    client: str | None  # address
    status: int | None  # of the answer; None = it failed, or its caller left before
    location: str | None  # of what the order started
    seconds: float


class StartSweepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator asks for."""

    groups: tuple[str, ...] = ()  # empty = all
    data: bool = True
    unlocked_only: bool = False
    swa_resident_only: bool = False
