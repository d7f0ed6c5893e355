"""/canary/status, /canary/violations, and the commands pause and resume."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Query, Request, Response

from canary_obs import __version__
from canary_obs.hub.ranks import rank_name
from canary_obs.hub.violation_store import ViolationFilter
from canary_obs.records import RankKey
from canary_obs.service.context import context_of
from canary_obs.service.query_parameters import AS_DECLARED
from canary_obs.service.request_bodies import RankBody
from canary_obs.service.route_policy import TokenScope, requires
from canary_obs.service.schemas import (
    Reached,
    StatusReport,
    ViolationPage,
    ViolationsQuery,
    documented,
    reply,
)

router = APIRouter(prefix="/canary", tags=["canary"])


@router.get("/status", openapi_extra=requires(TokenScope.READ), responses=documented(StatusReport, 200))
async def status(request: Request) -> Response:
    """The verdict with its reasons, and every rank with its latest snapshot."""
    hub = context_of(request).hub
    state, reasons = hub.verdict()
    return reply(StatusReport(version=__version__, state=state, reasons=reasons, ranks=hub.ranks()))


@router.get(
    "/violations",
    openapi_extra=requires(TokenScope.READ),
    responses=documented(ViolationPage, 200, 422),
    dependencies=AS_DECLARED,
)
def violations(request: Request, query: Annotated[ViolationsQuery, Query()]) -> Response:
    """Kept violations, newest first. Engines redact token ids unless their setting `reveal_tokens` is on."""
    hub = context_of(request).hub
    matching = ViolationFilter(**query.model_dump(exclude={"limit"}))
    found = hub.violations(matching)
    page = tuple(found[: query.limit])
    following = page[-1].number if len(found) > len(page) else None
    evicted = hub.counts().evicted
    return reply(ViolationPage(violations=page, matching=len(found), evicted=evicted, next=following))


@router.post(
    "/pause",
    status_code=202,
    responses=documented(Reached, 202, 404, 422, 503),
    openapi_extra=requires(TokenScope.OPERATE),
    dependencies=AS_DECLARED,
)
async def pause(request: Request, body: Annotated[RankBody | None, Body()] = None) -> Response:
    """Stop sweeps and patrol on every rank, or on some; the checks around each forward continue."""
    return _reached(context_of(request).hub.pause((body or RankBody()).selection))


@router.post(
    "/resume",
    status_code=202,
    responses=documented(Reached, 202, 404, 422, 503),
    openapi_extra=requires(TokenScope.OPERATE),
    dependencies=AS_DECLARED,
)
async def resume(request: Request, body: Annotated[RankBody | None, Body()] = None) -> Response:
    """Continue sweeps and patrol on every rank, or on some."""
    return _reached(context_of(request).hub.resume((body or RankBody()).selection))


def _reached(keys: tuple[RankKey, ...]) -> Response:
    return reply(Reached(ranks=len(keys), reached=tuple(map(rank_name, keys))), 202)
