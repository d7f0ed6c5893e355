"""The console's pages and what they load: static files of this package, without a build step."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import HTMLResponse, Response

from canary_obs.service.problems import Problem
from canary_obs.service.route_policy import TokenScope, public, requires
from canary_obs.service.schemas import ProblemDocument, documented

router = APIRouter(tags=["console"])

_MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Only this service's own files: no inline script or style, no frame, and no HTML from strings.
_POLICY = "; ".join(
    (
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'",
        "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'", "trusted-types 'none'",
    )
)  # fmt: skip
_HEADERS = {"Content-Security-Policy": _POLICY, "Cross-Origin-Opener-Policy": "same-origin"}


def _read_web() -> Mapping[str, str]:
    folder = files("canary_obs.service").joinpath("web")
    return {file.name: file.read_text("utf-8") for file in folder.iterdir() if file.is_file()}


_FILES = _read_web()

IncidentId = Annotated[str, Path(min_length=1, max_length=128)]


@router.get("/", openapi_extra=requires(TokenScope.READ, page=True), response_class=HTMLResponse)
async def overview() -> HTMLResponse:
    """The fleet: every rank's state, its coverage, sweeps and incidents. Data are loaded by its script."""
    return _page("overview.html")


@router.get(
    "/incidents/{incident_id}",
    openapi_extra=requires(TokenScope.READ, page=True),
    response_class=HTMLResponse,
    responses=documented(ProblemDocument, 422),
)
async def incident(incident_id: IncidentId) -> HTMLResponse:
    """One incident: what happened, what may have caused it, what to do next."""
    del incident_id  # read by the page's script
    return _page("incident.html")


@router.get("/sign-in", openapi_extra=public(), response_class=HTMLResponse)
async def sign_in_page() -> HTMLResponse:
    """The form that exchanges a token for a session. Needs no token, as it shows nothing of the service."""
    return _page("sign-in.html")


@router.get(
    "/console/assets/{name}",
    openapi_extra=public(),
    response_class=Response,
    responses={
        200: {"content": {media_type: {} for media_type in _MEDIA_TYPES.values()}},
        **documented(ProblemDocument, 404, 422),
    },
)
async def asset(request: Request, name: Annotated[str, Path(max_length=64)]) -> Response:
    """A script, style or picture of the pages. Needs no token: the files are those of the package."""
    suffix = name[name.rfind(".") :] if "." in name else ""
    if suffix not in _MEDIA_TYPES or name not in _FILES:
        raise Problem(404, "no-such-file", f"{request.url.path}: the console has no such file")
    return Response(_FILES[name], media_type=_MEDIA_TYPES[suffix])


def _page(name: str) -> HTMLResponse:
    return HTMLResponse(_FILES[name], headers=_HEADERS)
