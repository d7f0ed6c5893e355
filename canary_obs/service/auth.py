"""Authentication and authorization of HTTP requests, write limits and the audit of write requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from canary_obs.binding import is_loopback
from canary_obs.config import PREFIX
from canary_obs.service.problems import problem
from canary_obs.service.rate_limiter import RateLimiter
from canary_obs.service.route_policy import WRITE_SCOPES, RoutePolicy, RouteRule, permits
from canary_obs.service.sessions import CSRF_HEADER, Session, session_id_of
from canary_obs.service.sign_in import SignIn
from canary_obs.service.token_store import Caller
from canary_obs.telemetry.audit import AuditEvent

MAX_BODY_BYTES = 64 << 10
MAX_PATH_LOGGED = 256
CALLER_KEY = "canary_obs.signed_in"  # of the ASGI scope

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
)

Audit = Callable[[AuditEvent], None]


def caller_name(scope: Scope) -> str | None:
    """The name of the token that a request came with; None = it needed none."""
    signed_in: SignedIn | None = scope.get(CALLER_KEY)
    return None if signed_in is None or signed_in.caller is None else signed_in.caller.name


class AuthMiddleware:
    """ASGI middleware around the app: only routes with a rule are served, write requests are audited."""

    def __init__(
        self, app: ASGIApp, policy: RoutePolicy, sign_in: SignIn, limiter: RateLimiter, audit: Audit
    ) -> None:
        self._app, self._policy, self._sign_in = app, policy, sign_in
        self._limiter, self._audit = limiter, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the app, or answer it with a problem document."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_SECURITY_HEADERS]
            await send(message)

        headers = Headers(scope=scope)
        rule = self._policy.rule_for(scope["method"], scope["path"])
        caller, session = self._authenticate(headers, rule)
        scope[CALLER_KEY] = SignedIn(caller, session, self._sign_in)
        refused = self._refusal(scope, headers, rule, scope[CALLER_KEY])
        audited = self._audited(scope, rule)
        if audited is None or caller is None:
            await (refused or self._app)(scope, _LimitedBody(receive), send_secured)
            return
        response = _ResponseRecorder(send_secured)
        arrived_ns, started = time.time_ns(), time.monotonic()
        try:
            await (refused or self._app)(scope, _LimitedBody(receive), response)
        finally:
            event = AuditEvent(
                time_ns=arrived_ns, method=scope["method"], route=audited.path,
                path=scope["path"][:MAX_PATH_LOGGED], token=caller.name,
                scope=rule.scope.value if rule and rule.scope else None,
                client=scope["client"][0] if scope.get("client") else None,
                status=response.status, location=response.location, seconds=time.monotonic() - started,
            )  # fmt: skip
            self._audit(event)

    def _audited(self, scope: Scope, rule: RouteRule | None) -> RouteRule | None:
        """The route of a write request, also by a method that it does not have; None for all others."""
        safe = scope["method"] in _SAFE_METHODS
        if rule is not None:
            ends_session = rule.scope is not None and not safe
            return rule if rule.scope in WRITE_SCOPES or ends_session else None
        return None if safe else self._policy.rule_at(scope["path"])

    def _authenticate(self, headers: Headers, rule: RouteRule | None) -> tuple[Caller | None, Session | None]:
        tokens, authorization = self._sign_in.token_store, headers.get("authorization")
        # A header that was sent decides alone: a wrong token must not pass because of an old cookie.
        if tokens.empty or authorization is not None:
            return tokens.authenticate(authorization or ""), None
        if rule is not None and rule.scope is None:
            return None, None
        session_id = session_id_of(headers.get("cookie", ""), headers.get("host", ""))
        found = None if session_id is None else self._sign_in.find(session_id)
        return (None, None) if found is None else (found[1], found[0])

    def _refusal(
        self, scope: Scope, headers: Headers, rule: RouteRule | None, signed_in: SignedIn
    ) -> Response | None:
        path, caller = scope["path"], signed_in.caller
        if self._sign_in.token_store.empty and not is_loopback(_host_of(headers.get("host", "localhost"))):
            # DNS rebinding: a web page whose host name resolves to this machine.
            detail = f"without a token only loopback host names are served; set {PREFIX}TOKEN for others"
            return problem(421, detail, path)
        if rule is None or rule.scope is not None:
            if caller is None and rule is not None and rule.page and "text/html" in headers.get("accept", ""):
                return RedirectResponse(_sign_in_page(path), 303)
            if caller is None:
                challenge = {"WWW-Authenticate": 'Bearer realm="canary_obs"'}
                detail = "send a token of the service as Authorization: Bearer TOKEN"
                return problem(401, detail, path, headers=challenge)
            if (forbidden := self._forbidden(scope, rule, caller)) is not None:
                return forbidden
            if scope["method"] not in _SAFE_METHODS and not signed_in.permits_write(headers):
                detail = f"a session's write requests repeat its CSRF token ({CSRF_HEADER}); reload the page"
                return problem(403, detail, path, kind="csrf")
        origin = headers.get("origin")
        if origin and scope["method"] not in _SAFE_METHODS and _netloc_of(origin) != headers.get("host"):
            return problem(403, "a page of another origin may not send write requests", path)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return problem(413, f"a request body may have at most {MAX_BODY_BYTES} bytes", path)
        if rule is not None and rule.scope in WRITE_SCOPES and caller is not None:
            return self._rate_limited(caller, path)
        return None

    def _rate_limited(self, caller: Caller, path: str) -> Response | None:
        seconds = math.ceil(self._limiter.acquire(caller.name))
        if seconds == 0:
            return None
        detail = f"too many write requests; retry in {seconds} s (limit: {PREFIX}ORDERS_PER_MINUTE)"
        return problem(429, detail, path, kind="too-many-orders", headers={"Retry-After": str(seconds)})

    def _forbidden(self, scope: Scope, rule: RouteRule | None, caller: Caller) -> Response | None:
        method, path = scope["method"], scope["path"]
        if rule is None:
            if methods := ", ".join(self._policy.allowed_methods(path)):
                detail = f"{method} {path}: use {methods}"
                return problem(405, detail, path, headers={"Allow": methods})
            return problem(404, f"{method} {path}: not found; GET /openapi.json lists all routes", path)
        if rule.scope is None or permits(caller.scopes, rule.scope):
            return None
        who = "a request without a token" if caller.name is None else f"token {caller.name!r}"
        detail = f"{who} lacks the scope {rule.scope.value!r}"
        granted = sorted(caller.scopes)
        return problem(403, detail, path, kind="missing-scope", needed=rule.scope.value, granted=granted)


@dataclass(frozen=True, slots=True)
class SignedIn:
    """Who sent a request, and the session that it came with; None = unknown, or no session."""

    caller: Caller | None
    session: Session | None
    _sign_in: SignIn

    def permits_write(self, headers: Headers) -> bool:
        """Whether it is no request that another site's page had a browser send."""
        return self.session is None or self.session.permits_write(headers.get(CSRF_HEADER, ""))

    def lasts(self) -> bool:
        """Whether it is still allowed: its session is open, or the token in its header still accepted."""
        if self.session is not None:
            return self._sign_in.is_open(self.session)
        return self.caller is not None and self._sign_in.token_store.accepts(self.caller)


def signed_in_of(request: Request) -> SignedIn:
    """Who sent a request."""
    found = request.scope[CALLER_KEY]
    assert isinstance(found, SignedIn)
    return found


def _sign_in_page(path: str) -> str:
    # Relative: behind a proxy the service may have a path of its own.
    depth = path.count("/") - 1
    following = path.strip("/")
    return "../" * depth + "sign-in" + (f"?next={quote(following)}" if following else "")


class _ResponseRecorder:
    """Passes a response on and records its status and Location header."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.location: str | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.location = dict(message["headers"]).get(b"location", b"").decode("latin-1") or None
        await self._send(message)


class _LimitedBody:
    """A request body that ends as a disconnect once it exceeds MAX_BODY_BYTES, announced or not."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._received_bytes = receive, 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._received_bytes += len(message.get("body", b""))
        return {"type": "http.disconnect"} if self._received_bytes > MAX_BODY_BYTES else message


def _netloc_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:  # an address in brackets that is none
        return None


def _host_of(netloc: str) -> str:
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""
