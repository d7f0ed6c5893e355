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


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A write request by a known caller and its outcome, for the audit log."""

    time_ns: int  # of arrival
    method: str
    route: str  # template, as in /canary/sweeps/{sweep_id}
    path: str
    scope: str  # that the route requires
    token: str | None  # the token's name, never the token; None = the service runs without tokens
    client: str | None  # address
    status: int | None  # None = the app raised, or the client disconnected before the response
    location: str | None  # Location header: what the request has started
    seconds: float


class StartSweepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator asks for."""

    groups: tuple[str, ...] = ()  # empty = all
    data: bool = True
    unlocked_only: bool = False
    swa_resident_only: bool = False
