"""Who may ask: a bearer token on every route when one is set, and no strangers' web pages in any case."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from canary_obs.config import PREFIX, ServiceConfig, is_loopback
from canary_obs.errors import ConfigurationError
from canary_obs.service.problems import problem

# Probes carry no token; these two answer yes or no and nothing else.
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
MAX_BODY_BYTES = 64 << 10

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
)


def check_exposure(config: ServiceConfig) -> None:
    """Refuse to bind wider than loopback without a token. Raises ConfigurationError."""
    if not config.token and not is_loopback(config.host):
        rule = "without a token the service binds to loopback only"
        raise ConfigurationError("host", config.host, rule, f"Set {PREFIX}TOKEN, or bind to 127.0.0.1.")


class Gate:
    """ASGI middleware in front of everything, so that a new route is closed until it is let through."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with a problem document."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_SECURITY_HEADERS]
            await send(message)

        refused = self._refusal(scope, Headers(scope=scope))
        await (refused or self._app)(scope, _Limited(receive), send_secured)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        path = scope["path"]
        if self._token:
            if path not in OPEN_PATHS and not self._knows_token(headers):
                challenge = {"WWW-Authenticate": 'Bearer realm="canary_obs"'}
                detail = "send the service's token as Authorization: Bearer TOKEN"
                return problem(401, detail, path, headers=challenge)
        elif not is_loopback(_host_of(headers.get("host", "localhost"))):
            # DNS rebinding: a web page whose name was pointed at this machine.
            detail = f"without a token only loopback names are served; set {PREFIX}TOKEN for others"
            return problem(421, detail, path)
        origin = headers.get("origin")
        if origin and scope["method"] not in _SAFE_METHODS and urlsplit(origin).netloc != headers.get("host"):
            return problem(403, "a page of another origin may not give orders", path)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return problem(413, f"a body may have {MAX_BODY_BYTES} bytes", path)
        return None

    def _knows_token(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Header values arrive as latin-1; back to the bytes that were sent.
        matches = hmac.compare_digest(given.strip().encode("latin-1"), self._token)
        return matches and scheme.lower() == "bearer"


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
