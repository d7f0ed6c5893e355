"""/canary/status, violations, and the orders to all ranks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from canary_obs import __version__
from canary_obs.hub.violation_store import ViolationFilter
from canary_obs.service.context import context_of
from canary_obs.service.route_policy import TokenScope, needs
from canary_obs.service.schemas import (
    Reached,
    StatusReport,
    ViolationPage,
    ViolationsQuery,
    documented,
    reply,
)

router = APIRouter(prefix="/canary", tags=["canary"])


@router.get("/status", openapi_extra=needs(TokenScope.READ), responses=documented(StatusReport, 200))
async def status(request: Request) -> Response:
    """The verdict with its reasons, and every rank with its latest snapshot."""
    hub = context_of(request).hub
    state, reasons = hub.verdict()
    return reply(StatusReport(version=__version__, state=state, reasons=reasons, ranks=hub.ranks()))


@router.get(
    "/violations", openapi_extra=needs(TokenScope.READ), responses=documented(ViolationPage, 200, 422)
)
def violations(request: Request, query: Annotated[ViolationsQuery, Query()]) -> Response:
    """Violations kept, newest first; tokens are redacted by the engine unless it was told to reveal them."""
    hub = context_of(request).hub
    wanted = ViolationFilter(**query.model_dump(exclude={"limit"}))
    found = hub.violations(wanted)
    page = tuple(found[: query.limit])
    following = page[-1].number if len(found) > len(page) else None
    evicted = hub.counts().evicted
    return reply(ViolationPage(violations=page, matching=len(found), evicted=evicted, next=following))


@router.post(
    "/pause",
    status_code=202,
    responses=documented(Reached, 202, 503),
    openapi_extra=needs(TokenScope.OPERATE),
)
async def pause(request: Request) -> Response:
    """Stop sweeps and patrol on every rank; the checks around the forward go on."""
    return _reached(context_of(request).hub.pause())


@router.post(
    "/resume",
    status_code=202,
    responses=documented(Reached, 202, 503),
    openapi_extra=needs(TokenScope.OPERATE),
)
async def resume(request: Request) -> Response:
    """Undo pause."""
    return _reached(context_of(request).hub.resume())


@router.post(
    "/acknowledge",
    status_code=202,
    responses=documented(Reached, 202),
    openapi_extra=needs(TokenScope.OPERATE),
)
async def acknowledge(request: Request) -> Response:
    """An operator has seen everything up to now; ranks that are gone are dismissed."""
    return _reached(context_of(request).hub.acknowledge())


def _reached(ranks: int) -> Response:
    return reply(Reached(ranks=ranks), 202)
