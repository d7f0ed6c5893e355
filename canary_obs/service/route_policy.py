"""Which scope each route requires. A route that declares none is refused at start."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.routing import compile_path

SCOPE_EXTENSION = "x-kv-canary-scope"
PAGE_EXTENSION = "x-kv-canary-page"
_PUBLIC = "none"


class TokenScope(StrEnum):
    """What a token may do; no scope includes another, but for `read`, which includes `scrape`."""

    SCRAPE = "scrape"  # GET /metrics alone, for Prometheus
    READ = "read"  # everything that changes nothing
    OPERATE = "operate"  # sweeps, pause, resume, acknowledge
    INJECT = "inject"  # drills, which inject faults on purpose


_INCLUDED = {TokenScope.SCRAPE: TokenScope.READ}  # a scope -> the one that includes it
WRITE_SCOPES = frozenset({TokenScope.OPERATE, TokenScope.INJECT})  # rate-limited and audited


def permits(granted: Collection[TokenScope], needed: TokenScope) -> bool:
    """Whether these scopes allow what needs one."""
    return needed in granted or _INCLUDED.get(needed) in granted


def requires(scope: TokenScope, *, page: bool = False) -> dict[str, Any]:
    """`openapi_extra` of a route that requires a scope; a `page` leads strange browsers to sign in."""
    return {SCOPE_EXTENSION: scope.value} | ({PAGE_EXTENSION: True} if page else {})


def public() -> dict[str, Any]:
    """`openapi_extra` of a route that needs no token. It must not reveal more than yes or no."""
    return {SCOPE_EXTENSION: _PUBLIC}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRule:
    """A route and the scope it requires; `scope` None = public."""

    path: str  # template, as in /canary/sweeps/{sweep_id}
    methods: frozenset[str]
    pattern: re.Pattern[str]
    scope: TokenScope | None
    page: bool = False


class RoutePolicy:
    """The rules of all routes. Raises ValueError for a route that declares no scope."""

    def __init__(self, routers: Iterable[APIRouter]) -> None:
        self._rules = tuple(_rule_of(route) for router in routers for route in router.routes)

    def rule_for(self, method: str, path: str) -> RouteRule | None:
        """The rule of the route that serves a request, if there is one."""
        return next((rule for rule in self._matching(path) if method in rule.methods), None)

    def rule_at(self, path: str) -> RouteRule | None:
        """The rule of a route at a path, whatever its methods."""
        return next(self._matching(path), None)

    def allowed_methods(self, path: str) -> list[str]:
        """The methods of a path, sorted; empty = no such path."""
        return sorted({method for rule in self._matching(path) for method in rule.methods})

    def _matching(self, path: str) -> Iterator[RouteRule]:
        return (rule for rule in self._rules if rule.pattern.match(path))


def _rule_of(route: object) -> RouteRule:
    if not isinstance(route, APIRoute) or SCOPE_EXTENSION not in (route.openapi_extra or {}):
        raise ValueError(f"{route!r} declares no scope; add openapi_extra=requires(TokenScope...) to it")
    declared = (route.openapi_extra or {})[SCOPE_EXTENSION]
    return RouteRule(
        path=route.path,
        methods=frozenset(route.methods or ()),
        pattern=compile_path(route.path)[0],
        scope=None if declared == _PUBLIC else TokenScope(declared),
        page=bool((route.openapi_extra or {}).get(PAGE_EXTENSION)),
    )
