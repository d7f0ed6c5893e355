"""Who may ask: a token with the route's scope where tokens are set, and never a stranger's web page."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from canary_obs.config import PREFIX, is_loopback
from canary_obs.hub.commands import OrderEvent
from canary_obs.service.problems import problem
from canary_obs.service.rate_limiter import RateLimiter
from canary_obs.service.route_policy import ORDERS, RoutePolicy, RouteRule
from canary_obs.service.token_store import Caller, TokenStore

MAX_BODY_BYTES = 64 << 10
MAX_PATH_LOGGED = 256

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
)


Audit = Callable[[OrderEvent], None]


class AuthMiddleware:
    """ASGI middleware in front of everything: what has no door stays closed, every order is written down."""

    def __init__(
        self, app: ASGIApp, doors: RoutePolicy, token_store: TokenStore, limiter: RateLimiter, audit: Audit
    ) -> None:
        self._app, self._doors, self._keyring = app, doors, token_store
        self._allowance, self._audit = limiter, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with a problem document."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_SECURITY_HEADERS]
            await send(message)

        headers = Headers(scope=scope)
        door = self._doors.find(scope["method"], scope["path"])
        caller = self._keyring.caller(headers.get("authorization", ""))
        refused = self._refusal(scope, headers, door, caller)
        if door is None or door.scope not in ORDERS or caller is None:
            await (refused or self._app)(scope, _Limited(receive), send_secured)
            return
        answer = _Answer(send_secured)
        arrived_ns, began = time.time_ns(), time.monotonic()
        try:
            await (refused or self._app)(scope, _Limited(receive), answer)
        finally:
            order = OrderEvent(
                time_ns=arrived_ns, method=scope["method"], route=door.path,
                path=scope["path"][:MAX_PATH_LOGGED], scope=door.scope.value, token=caller.name,
                client=scope["client"][0] if scope.get("client") else None,
                status=answer.status, location=answer.location, seconds=time.monotonic() - began,
            )  # fmt: skip
            self._audit(order)

    def _refusal(
        self, scope: Scope, headers: Headers, door: RouteRule | None, caller: Caller | None
    ) -> Response | None:
        path = scope["path"]
        if self._keyring.empty and not is_loopback(_host_of(headers.get("host", "localhost"))):
            # DNS rebinding: a web page whose name was pointed at this machine.
            detail = f"without a token only loopback names are served; set {PREFIX}TOKEN for others"
            return problem(421, detail, path)
        if door is None or door.scope is not None:
            if caller is None:
                challenge = {"WWW-Authenticate": 'Bearer realm="canary_obs"'}
                detail = "send a token of the service as Authorization: Bearer TOKEN"
                return problem(401, detail, path, headers=challenge)
            if (closed := self._closed(scope, door, caller)) is not None:
                return closed
        origin = headers.get("origin")
        if origin and scope["method"] not in _SAFE_METHODS and urlsplit(origin).netloc != headers.get("host"):
            return problem(403, "a page of another origin may not give orders", path)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return problem(413, f"a body may have {MAX_BODY_BYTES} bytes", path)
        if door is not None and door.scope in ORDERS and caller is not None:
            return self._too_many(caller, path)
        return None

    def _too_many(self, caller: Caller, path: str) -> Response | None:
        seconds = math.ceil(self._allowance.wait(caller.name))
        if seconds == 0:
            return None
        detail = f"too many orders; the next one may come in {seconds} s ({PREFIX}ORDERS_PER_MINUTE)"
        return problem(429, detail, path, kind="too-many-orders", headers={"Retry-After": str(seconds)})

    def _closed(self, scope: Scope, door: RouteRule | None, caller: Caller) -> Response | None:
        method, path = scope["method"], scope["path"]
        if door is None:
            if methods := ", ".join(self._doors.methods(path)):
                detail = f"{method} {path}: use {methods}"
                return problem(405, detail, path, headers={"Allow": methods})
            return problem(404, f"{method} {path}: not found; GET /openapi.json lists what there is", path)
        if door.scope is None or door.scope in caller.scopes:
            return None
        who = "without a token" if caller.name is None else f"token {caller.name!r}"
        detail = f"{who} may not do this: it needs the scope {door.scope.value!r}"
        granted = sorted(caller.scopes)
        return problem(403, detail, path, kind="missing-scope", needed=door.scope.value, granted=granted)


class _Answer:
    """Passes an answer on and remembers what it was."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.location: str | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.location = dict(message["headers"]).get(b"location", b"").decode("latin-1") or None
        await self._send(message)


class _Limited:
    """A request body that ends as a disconnect once it is longer than announced bodies may be."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._seen = receive, 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        return {"type": "http.disconnect"} if self._seen > MAX_BODY_BYTES else message


def _host_of(netloc: str) -> str:
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""
