"""/canary/acknowledge and /canary/acknowledgements: what an operator has seen, and taking that back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Request, Response

from canary_obs.hub.acknowledgements import AcknowledgementRecord, AcknowledgeRequest
from canary_obs.service.auth import caller_name
from canary_obs.service.context import context_of
from canary_obs.service.problems import Problem
from canary_obs.service.query_parameters import AS_DECLARED
from canary_obs.service.request_bodies import AcknowledgeBody
from canary_obs.service.route_policy import TokenScope, requires
from canary_obs.service.schemas import AcknowledgementList, documented, reply

router = APIRouter(prefix="/canary", tags=["acknowledgements"])

AcknowledgementId = Annotated[str, Path(min_length=1, max_length=128)]


@router.post(
    "/acknowledge",
    status_code=202,
    responses=documented(AcknowledgementRecord, 202, 404, 422),
    dependencies=AS_DECLARED,
    openapi_extra=requires(TokenScope.OPERATE),
)
async def acknowledge(
    request: Request,
    body: Annotated[AcknowledgeBody | None, Body()] = None,
    up_to: Annotated[
        int | None,
        Query(ge=0, description="As the body's `up_to`, which goes before."),
    ] = None,
) -> Response:
    """Mark violations as seen by an operator: all, one incident's, or those of some ranks.

    Silent ranks are dismissed and faults forgotten, unless an incident is named. What an engine found and the
    service did not know yet stays unacknowledged.
    """
    seen = body or AcknowledgeBody()
    wanted = AcknowledgeRequest(
        incident=seen.incident, selection=seen.selection, comment=seen.comment,
        up_to=up_to if seen.up_to is None else seen.up_to, by=seen.by or caller_name(request.scope),
    )  # fmt: skip
    return reply(context_of(request).hub.acknowledge(wanted), 202)


@router.get(
    "/acknowledgements",
    openapi_extra=requires(TokenScope.READ),
    responses=documented(AcknowledgementList, 200),
)
async def list_acknowledgements(request: Request) -> Response:
    """Kept acknowledgements, newest first."""
    made = context_of(request).hub.acknowledgements.newest_first()
    return reply(AcknowledgementList(acknowledgements=tuple(made)))


@router.delete(
    "/acknowledgements/{acknowledgement_id}",
    status_code=202,
    responses=documented(AcknowledgementRecord, 202, 404, 422),
    openapi_extra=requires(TokenScope.OPERATE),
    dependencies=AS_DECLARED,
)
async def undo_acknowledgement(request: Request, acknowledgement_id: AcknowledgementId) -> Response:
    """Take an acknowledgement back: its incidents, and the states of their ranks, are open again."""
    record = context_of(request).hub.acknowledgements.undo(acknowledgement_id)
    if record is None:
        detail = f"no acknowledgement {acknowledgement_id!r} is kept; GET /canary/acknowledgements lists them"
        raise Problem(404, "no-such-acknowledgement", detail)
    return reply(record, 202)
