"""/console/fleet: the data of the console's overview, in one small document."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from canary_obs.service.context import context_of
from canary_obs.service.fleet import FleetView, IncidentRow, fleet_view, shown_incidents
from canary_obs.service.route_policy import TokenScope, requires
from canary_obs.service.schemas import documented, reply

router = APIRouter(prefix="/console", tags=["console"])


@router.get("/fleet", openapi_extra=requires(TokenScope.READ), responses=documented(FleetView, 200))
async def fleet(request: Request) -> Response:
    """The verdict, every rank worst first, the operator's latest sweep with its ETA, and incidents."""
    context = context_of(request)
    incidents = [
        IncidentRow(
            id=one.id, engine=one.engine, instance=one.instance, ranks=one.ranks, opened_ns=one.opened_ns,
            last_ns=one.last_ns, closed_ns=one.closed_ns, acknowledged=one.acknowledged,
            violations=one.violations, reasons=one.reasons, sentence="",
        )
        for one in shown_incidents(context.hub)
    ]  # fmt: skip
    return reply(fleet_view(context.hub, context.sweep_follower.latest(), incidents))
