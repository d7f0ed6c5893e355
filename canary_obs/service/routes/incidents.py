"""/canary/incidents: bursts of violations with their evidence."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from canary_obs.hub.rank_selection import RankSelection
from canary_obs.service.context import context_of
from canary_obs.service.problems import Problem
from canary_obs.service.query_parameters import AS_DECLARED
from canary_obs.service.route_policy import TokenScope, requires
from canary_obs.service.schemas import (
    IncidentList,
    IncidentsQuery,
    TaintedPage,
    TaintedQuery,
    documented,
    reply,
)
from canary_obs.telemetry.incident_bundle import IncidentBundle, build_bundle

router = APIRouter(prefix="/canary", tags=["incidents"])

IncidentId = Annotated[str, Path(min_length=1, max_length=128)]


@router.get(
    "/incidents",
    openapi_extra=requires(TokenScope.READ),
    responses=documented(IncidentList, 200, 422),
    dependencies=AS_DECLARED,
)
async def list_incidents(request: Request, query: Annotated[IncidentsQuery, Query()]) -> Response:
    """Kept incidents, newest first."""
    found = context_of(request).hub.incidents.newest_first()
    return reply(IncidentList(incidents=tuple(found[: query.limit])))


@router.get(
    "/incidents/{incident_id}",
    openapi_extra=requires(TokenScope.READ),
    responses=documented(IncidentBundle, 200, 404, 422),
)
async def show_incident(request: Request, incident_id: IncidentId) -> Response:
    """The incident bundle: violations, recorded and found bytes, changed elements, and the ranks involved."""
    bundle = build_bundle(context_of(request).hub, incident_id)
    if bundle is None:
        detail = f"no incident {incident_id!r} is kept; GET /canary/incidents lists them"
        raise Problem(404, "no-such-incident", detail)
    return reply(bundle)


@router.get(
    "/tainted",
    openapi_extra=requires(TokenScope.READ),
    responses=documented(TaintedPage, 200, 422),
    dependencies=AS_DECLARED,
)
def list_tainted(request: Request, query: Annotated[TaintedQuery, Query()]) -> Response:
    """Which requests read damage. Poll with `since=next`: what changes comes again."""
    taints = context_of(request).hub.taints
    ranks = () if query.rank is None else (query.rank,)
    selection = RankSelection(engine=query.engine, instance=query.instance, ranks=ranks)
    evicted = taints.forgotten > query.since
    found = [one for one in taints.after(query.since) if selection.matches(one.identity.key)]
    page = tuple(found[: query.limit])
    following = page[-1].number if page else query.since
    return reply(TaintedPage(tainted=page, matching=len(found), evicted=evicted, next=following))
