"""/healthz, /readyz and /metrics: what machines ask."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from canary_obs.service.context import context_of
from canary_obs.service.problems import Problem
from canary_obs.service.route_policy import TokenScope, needs, open_to_all
from canary_obs.service.schemas import Health, documented, reply

router = APIRouter(tags=["probes"])


@router.get("/healthz", openapi_extra=open_to_all(), responses=documented(Health, 200))
def healthz() -> Response:
    """The process answers. Open even when a token is set."""
    return reply(Health(status="ok"))


@router.get("/readyz", openapi_extra=open_to_all(), responses=documented(Health, 200, 503))
def readyz(request: Request) -> Response:
    """Engines can reach the service. Open even when a token is set; whether one does is not asked here."""
    if not context_of(request).listening():
        raise Problem(503, "not-listening", "the listener for engines has ended; restart the service")
    return reply(Health(status="ok"))


@router.get(
    "/metrics",
    openapi_extra=needs(TokenScope.READ),
    responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}},
)
def metrics(request: Request) -> Response:
    """Every metric, as Prometheus text or OpenMetrics by the Accept header."""
    page, media_type = context_of(request).metrics.page(request.headers.get("accept", ""))
    return Response(page, headers={"content-type": media_type})


@router.get("/openapi.json", openapi_extra=needs(TokenScope.READ), include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    """What there is to ask for."""
    return JSONResponse(request.app.openapi())
