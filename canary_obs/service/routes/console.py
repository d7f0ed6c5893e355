"""/console/fleet and /console/incidents: the data of the console's pages."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from canary_obs.hub.hub import Hub
from canary_obs.hub.incidents import IncidentSummary
from canary_obs.service.context import context_of
from canary_obs.service.fleet import FleetView, IncidentRow, fleet_view, shown_incidents
from canary_obs.service.incident.report import IncidentReport, build_report
from canary_obs.service.incident.sentence import sentence_of
from canary_obs.service.problems import Problem
from canary_obs.service.route_policy import TokenScope, requires
from canary_obs.service.schemas import documented, reply

router = APIRouter(prefix="/console", tags=["console"])

IncidentId = Annotated[str, Path(min_length=1, max_length=128)]


@router.get("/fleet", openapi_extra=requires(TokenScope.READ), responses=documented(FleetView, 200))
async def fleet(request: Request) -> Response:
    """The verdict, every rank worst first, the operator's latest sweep with its ETA, and incidents."""
    context = context_of(request)
    incidents = [_incident_row(context.hub, incident) for incident in shown_incidents(context.hub)]
    return reply(fleet_view(context.hub, context.sweep_follower.latest(), incidents))


@router.get(
    "/incidents/{incident_id}",
    openapi_extra=requires(TokenScope.READ),
    responses=documented(IncidentReport, 200, 404, 422),
)
async def incident_report(request: Request, incident_id: IncidentId) -> Response:
    """What happened in a sentence, likely causes, next commands, timeline, damage map, slots, requests."""
    context = context_of(request)
    report = build_report(context.hub, incident_id, context.config.runbook_base)
    if report is None:
        detail = f"no incident {incident_id!r} is kept; GET /canary/incidents lists them"
        raise Problem(404, "no-such-incident", detail)
    return reply(report)


def _incident_row(hub: Hub, summary: IncidentSummary) -> IncidentRow:
    incident = hub.incidents.find(summary.id)
    return IncidentRow(
        id=summary.id, engine=summary.engine, instance=summary.instance, ranks=summary.ranks,
        opened_ns=summary.opened_ns, last_ns=summary.last_ns, closed_ns=summary.closed_ns,
        acknowledged=summary.acknowledged, violations=summary.violations, reasons=summary.reasons,
        sentence="" if incident is None else sentence_of(incident),
    )  # fmt: skip
