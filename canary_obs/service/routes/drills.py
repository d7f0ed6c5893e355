"""/canary/drill: inject a fault into an unused slot of every rank, and report whether it was detected."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from canary_obs.config import PREFIX
from canary_obs.hub.drills import DrillRecord
from canary_obs.service.context import DRILL_SECONDS, context_of
from canary_obs.service.problems import Problem
from canary_obs.service.query_parameters import AS_DECLARED
from canary_obs.service.request_bodies import RankBody
from canary_obs.service.route_policy import TokenScope, requires
from canary_obs.service.schemas import documented, reply
from canary_obs.service.traceparent import TraceParent, valid_or_none

router = APIRouter(prefix="/canary", tags=["drills"])


@router.post(
    "/drill",
    responses=documented(DrillRecord, 200, 403, 404, 409, 422, 503),
    openapi_extra=requires(TokenScope.INJECT),
    dependencies=AS_DECLARED,
)
async def drill(
    request: Request,
    body: Annotated[RankBody | None, Body()] = None,
    traceparent: TraceParent = None,
) -> Response:
    """Inject one fault per rank, or per rank that is named, into an unused slot; returns how each ended.

    The drill's span is a child of `traceparent`'s; one that is not valid is left out.
    """
    context = context_of(request)
    if not context.config.drill_enabled:
        detail = f"drills are disabled; set {PREFIX}DRILL_ENABLED=true for the service and for its engines"
        raise Problem(403, "drills-disabled", detail)
    selection = (body or RankBody()).selection
    drill_id, pending = context.start_drill(selection, valid_or_none(traceparent))
    result: asyncio.Future[DrillRecord] = asyncio.wrap_future(pending)
    await asyncio.wait([result], timeout=DRILL_SECONDS)
    if not result.done():
        context.hub.drills.finish(drill_id)
    return reply(await result)
