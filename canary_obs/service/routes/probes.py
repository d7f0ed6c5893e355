"""/healthz, /readyz, /metrics and /openapi.json."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from canary_obs.service.context import context_of
from canary_obs.service.problems import Problem
from canary_obs.service.route_policy import TokenScope, public, requires
from canary_obs.service.schemas import Health, documented, reply

router = APIRouter(tags=["probes"])


@router.get("/healthz", openapi_extra=public(), responses=documented(Health, 200))
def healthz() -> Response:
    """Liveness: the process answers. Needs no token."""
    return reply(Health(status="ok"))


@router.get("/readyz", openapi_extra=public(), responses=documented(Health, 200, 503))
def readyz(request: Request) -> Response:
    """Readiness: engines can connect; whether one has does not matter. Needs no token."""
    if not context_of(request).listening():
        raise Problem(503, "not-listening", "the listener for engines has stopped; restart the service")
    return reply(Health(status="ok"))


@router.get(
    "/metrics",
    openapi_extra=requires(TokenScope.SCRAPE),
    responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}},
)
def metrics(request: Request) -> Response:
    """All metrics, in Prometheus text format or OpenMetrics as the Accept header asks."""
    page, media_type = context_of(request).metrics.page(request.headers.get("accept", ""))
    return Response(page, headers={"content-type": media_type})


@router.get("/openapi.json", openapi_extra=requires(TokenScope.READ), include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    """The OpenAPI document."""
    return JSONResponse(request.app.openapi())
