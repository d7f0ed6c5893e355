"""Errors as RFC 9457 problem documents with type, title, status, detail and instance."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from canary_obs.hub.acknowledgements import UnknownIncident
from canary_obs.hub.commands import NoEngine, UnknownGroup
from canary_obs.hub.drills import DrillInProgress
from canary_obs.hub.rank_selection import UnknownRank
from canary_obs.hub.sweeps import SweepInProgress

log = logging.getLogger("canary_obs")

MEDIA_TYPE = "application/problem+json"
_TYPE_PREFIX = "urn:canary-obs:problem:"


class Problem(Exception):
    """Raised by a route to answer with a problem document.

    `kind` is the last part of the document's type; `extra` are further members; `retry_after` (seconds) among
    them also sets the header.
    """

    def __init__(self, status: int, kind: str, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail, self.extra = status, kind, detail, extra


def problem(
    status: int,
    detail: str,
    instance: str,
    *,
    kind: str | None = None,
    headers: Mapping[str, str] | None = None,
    **extra: Any,
) -> JSONResponse:
    """A problem document. Without `kind` its type is about:blank: nothing beyond the status."""
    title = kind.replace("-", " ").capitalize() if kind else HTTPStatus(status).phrase
    content = {
        "type": _TYPE_PREFIX + kind if kind else "about:blank",
        "title": title,
        "status": status,
        "detail": detail,
        "instance": instance,
        **extra,
    }
    return JSONResponse(content, status, dict(headers or {}), MEDIA_TYPE)


def install_problem_handlers(app: FastAPI) -> None:
    """Make every error of the app a problem document."""
    app.exception_handler(Problem)(_on_problem)
    app.exception_handler(HTTPException)(_on_http)
    app.exception_handler(RequestValidationError)(_on_invalid)
    app.exception_handler(SweepInProgress)(_on_sweep_running)
    app.exception_handler(DrillInProgress)(_on_drill_running)
    app.exception_handler(NoEngine)(_on_no_engine)
    app.exception_handler(UnknownGroup)(_on_unknown_group)
    app.exception_handler(UnknownRank)(_on_unknown_rank)
    app.exception_handler(UnknownIncident)(_on_unknown_incident)
    app.exception_handler(Exception)(_on_unexpected)


def _on_problem(request: Request, error: Problem) -> JSONResponse:
    seconds = error.extra.get("retry_after")
    headers = None if seconds is None else {"Retry-After": str(seconds)}
    return problem(
        error.status, error.detail, request.url.path, kind=error.kind, headers=headers, **error.extra
    )


def _on_http(request: Request, error: HTTPException) -> JSONResponse:
    detail = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 400:
        # FastAPI's status for a body that is not UTF-8; to clients it is one more malformed body.
        return problem(422, detail, request.url.path, kind="invalid-request")
    return problem(error.status_code, detail, request.url.path, headers=error.headers)


def _on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    # The input itself is left out: it may be a prompt that was sent by mistake.
    errors = [
        {"location": ".".join(map(str, item["loc"])), "message": item["msg"]} for item in error.errors()
    ]
    detail = "; ".join(f"{item['location']}: {item['message']}" for item in errors)
    return problem(422, detail, request.url.path, kind="invalid-request", errors=errors)


def _on_sweep_running(request: Request, error: SweepInProgress) -> JSONResponse:
    running = error.running_id
    return problem(409, str(error), request.url.path, kind="sweep-in-progress", running_id=running)


def _on_drill_running(request: Request, error: DrillInProgress) -> JSONResponse:
    return problem(409, str(error), request.url.path, kind="drill-in-progress")


def _on_no_engine(request: Request, error: NoEngine) -> JSONResponse:
    return problem(503, str(error), request.url.path, kind="no-engine")


def _on_unknown_group(request: Request, error: UnknownGroup) -> JSONResponse:
    return problem(422, str(error), request.url.path, kind="unknown-group", known=error.known)


def _on_unknown_rank(request: Request, error: UnknownRank) -> JSONResponse:
    return problem(404, str(error), request.url.path, kind="no-such-rank", known=error.known)


def _on_unknown_incident(request: Request, error: UnknownIncident) -> JSONResponse:
    return problem(404, str(error), request.url.path, kind="no-such-incident")


def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    log.error("canary_obs: %s %s failed", request.method, request.url.path, exc_info=error)
    detail = f"the service failed with {type(error).__name__}; its log has the details"
    return problem(500, detail, request.url.path)
