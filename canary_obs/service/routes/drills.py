"""/canary/drill: is a fault found? Plant one where nobody is hurt, and follow it to the metric."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from canary_obs.config import PREFIX
from canary_obs.hub.drills import DrillRecord
from canary_obs.service.context import DRILL_SECONDS, context_of
from canary_obs.service.problems import Problem
from canary_obs.service.route_policy import TokenScope, needs
from canary_obs.service.schemas import documented, reply

router = APIRouter(prefix="/canary", tags=["drills"])


@router.post(
    "/drill", responses=documented(DrillRecord, 200, 403, 409, 503), openapi_extra=needs(TokenScope.INJECT)
)
async def drill(request: Request) -> Response:
    """Every rank plants one fault in a slot that nobody uses; how each was found: outcome, phase, latency."""
    context = context_of(request)
    if not context.config.drill_enabled:
        detail = f"drills are off; set {PREFIX}DRILL_ENABLED=true for the service and for its engines"
        raise Problem(403, "drills-disabled", detail)
    drill_id, ended = context.start_drill()
    answer: asyncio.Future[DrillRecord] = asyncio.wrap_future(ended)
    await asyncio.wait([answer], timeout=DRILL_SECONDS)
    if not answer.done():
        context.hub.drills.end(drill_id)
    return reply(await answer)
