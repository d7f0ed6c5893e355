"""/console/session: sign in with a token, see who is signed in, sign out."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from canary_obs.service.auth import signed_in_of
from canary_obs.service.context import AppContext, context_of
from canary_obs.service.problems import Problem
from canary_obs.service.route_policy import TokenScope, public, requires
from canary_obs.service.schemas import SessionView, documented, reply
from canary_obs.service.sessions import Session, cookie_name
from canary_obs.service.token_store import Caller
from canary_obs.telemetry.audit import AuditEvent

router = APIRouter(prefix="/console", tags=["console"])


class SignInBody(BaseModel):
    """The token of the service, as in its settings or its tokens file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    token: Annotated[str, Field(min_length=1, max_length=512)]


@router.post(
    "/session",
    openapi_extra=public(),
    responses=documented(SessionView, 200, 401, 403, 409, 422, 429),
)
async def sign_in(request: Request, body: Annotated[SignInBody, Body()]) -> Response:
    """Exchange a token for a session: a cookie that scripts cannot read. Failed attempts are limited."""
    context, started = context_of(request), time.monotonic()
    address = request.client.host if request.client else ""
    try:
        session_id, session, caller = context.sign_in.open(body.token, address)
    except Problem as refusal:
        if refusal.status in (401, 403):  # limited attempts are not logged: they could fill a disk
            _audit(context, request, None, refusal.status, started)
        raise
    _audit(context, request, caller.name, 200, started)
    answer = reply(_view(context, caller, session))
    _set_cookie(answer, request, session_id, round(context.sign_in.sessions.seconds))
    return answer


@router.get("/session", openapi_extra=requires(TokenScope.READ), responses=documented(SessionView, 200))
async def show_session(request: Request) -> Response:
    """Who is signed in, with which scopes, until when; `csrf` goes into X-CSRF-Token of write requests."""
    signed_in = signed_in_of(request)
    assert signed_in.caller is not None
    return reply(_view(context_of(request), signed_in.caller, signed_in.session))


@router.delete(
    "/session",
    openapi_extra=requires(TokenScope.READ),
    status_code=204,
    response_class=Response,
)
async def sign_out(request: Request) -> Response:
    """End the session. Without one, nothing happens."""
    session = signed_in_of(request).session
    answer = Response(status_code=204)
    if session is not None:
        context_of(request).sign_in.sessions.close(session)
        _set_cookie(answer, request, "", 0)
    return answer


def _view(context: AppContext, caller: Caller, session: Session | None) -> SessionView:
    return SessionView(
        token=caller.name,
        scopes=tuple(sorted(scope.value for scope in caller.scopes)),
        csrf=None if session is None else session.csrf,
        ends_ns=None if session is None else session.ends_ns,
        drill_enabled=context.config.drill_enabled,
    )


def _set_cookie(answer: Response, request: Request, session_id: str, seconds: int) -> None:
    name, secure = cookie_name(request.headers.get("host", "")), request.url.scheme == "https"
    answer.set_cookie(name, session_id, max_age=seconds, httponly=True, samesite="strict", secure=secure)


def _audit(context: AppContext, request: Request, token: str | None, status: int, started: float) -> None:
    context.audit(
        AuditEvent(
            time_ns=time.time_ns(), method="POST", route=request.url.path, path=request.url.path,
            token=token, scope=None, client=request.client.host if request.client else None,
            status=status, location=None, seconds=time.monotonic() - started,
        )
    )  # fmt: skip
