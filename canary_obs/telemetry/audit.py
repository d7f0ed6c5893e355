"""Audit events: write requests to the service and their outcomes."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A write request by a known caller and its outcome, for the audit log."""

    time_ns: int  # of arrival
    method: str
    route: str  # template, as in /canary/sweeps/{sweep_id}
    path: str
    scope: str | None  # that the route requires; None = it does not have this method
    token: str | None  # the token's name, never the token; None = the service runs without tokens
    client: str | None  # address
    status: int | None  # None = the app raised, or the client disconnected before the response
    location: str | None  # Location header: what the request has started
    seconds: float


def audit_fields(request: AuditEvent) -> dict[str, str | int | float | None]:
    """Fields of a log line; the level is `warning` when the request was refused or failed."""
    failed = request.status is None or request.status >= 500
    done = request.status is not None and request.status < 400
    return {
        "event": "order",
        "timestamp": datetime.fromtimestamp(request.time_ns / 1e9, UTC).isoformat(),
        "level": "info" if done else "warning",
        "outcome": "done" if done else "failed" if failed else "refused",
        "method": request.method,
        "route": request.route,
        "path": request.path,
        "scope": request.scope,
        "token": request.token,
        "client": request.client,
        "status": request.status,
        "location": request.location,
        "seconds": request.seconds,
    }
