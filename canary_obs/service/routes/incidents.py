"""/canary/incidents: bursts of violations, and what is known of each."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from canary_obs.service.context import context_of
from canary_obs.service.problems import Problem
from canary_obs.service.route_policy import TokenScope, needs
from canary_obs.service.schemas import IncidentList, IncidentsQuery, documented, reply
from canary_obs.telemetry.incident_bundle import IncidentBundle, bundle_of

router = APIRouter(prefix="/canary", tags=["incidents"])

IncidentId = Annotated[str, Path(min_length=1, max_length=128)]


@router.get("/incidents", openapi_extra=needs(TokenScope.READ), responses=documented(IncidentList, 200, 422))
async def list_incidents(request: Request, query: Annotated[IncidentsQuery, Query()]) -> Response:
    """Incidents kept, newest first."""
    found = context_of(request).hub.incidents.newest_first()
    return reply(IncidentList(incidents=tuple(found[: query.limit])))


@router.get(
    "/incidents/{incident_id}",
    openapi_extra=needs(TokenScope.READ),
    responses=documented(IncidentBundle, 200, 404, 422),
)
async def show_incident(request: Request, incident_id: IncidentId) -> Response:
    """The evidence bundle: violations, records and bytes expected and found, what changed, who was there."""
    bundle = bundle_of(context_of(request).hub, incident_id)
    if bundle is None:
        detail = f"no incident {incident_id!r} is kept; GET /canary/incidents lists them"
        raise Problem(404, "no-such-incident", detail)
    return reply(bundle)
