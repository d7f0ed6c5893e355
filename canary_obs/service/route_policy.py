"""Which route needs which scope; what declares none does not exist for callers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.routing import compile_path

EXTENSION = "x-kv-canary-scope"
_OPEN = "none"


class TokenScope(StrEnum):
    """What a token may do; one does not include another."""

    READ = "read"  # everything that changes nothing
    OPERATE = "operate"  # sweeps, pause, resume, acknowledge
    INJECT = "inject"  # plant faults on purpose


ORDERS = frozenset({TokenScope.OPERATE, TokenScope.INJECT})


def needs(scope: TokenScope) -> dict[str, Any]:
    """`openapi_extra` of a route that needs a scope."""
    return {EXTENSION: scope.value}


def open_to_all() -> dict[str, Any]:
    """`openapi_extra` of a route that answers without a token: yes or no, and nothing else."""
    return {EXTENSION: _OPEN}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRule:
    """One route and what it takes to pass; `scope` None = nothing."""

    path: str  # with the names of its parameters
    methods: frozenset[str]
    pattern: re.Pattern[str]
    scope: TokenScope | None


class RoutePolicy:
    """Every route that may be asked for. Raises ValueError for one that declares no scope."""

    def __init__(self, routers: Iterable[APIRouter]) -> None:
        self._doors = tuple(_door(route) for router in routers for route in router.routes)

    def find(self, method: str, path: str) -> RouteRule | None:
        """The door of a request; None = there is none."""
        return next((door for door in self._at(path) if method in door.methods), None)

    def methods(self, path: str) -> list[str]:
        """What may be done at a path, sorted; empty = there is no such path."""
        return sorted({method for door in self._at(path) for method in door.methods})

    def _at(self, path: str) -> Iterable[RouteRule]:
        return (door for door in self._doors if door.pattern.match(path))


def _door(route: object) -> RouteRule:
    if not isinstance(route, APIRoute) or EXTENSION not in (route.openapi_extra or {}):
        raise ValueError(f"{route!r} declares no scope; add openapi_extra=needs(TokenScope...) to it")
    declared = (route.openapi_extra or {})[EXTENSION]
    return RouteRule(
        path=route.path,
        methods=frozenset(route.methods or ()),
        pattern=compile_path(route.path)[0],
        scope=None if declared == _OPEN else TokenScope(declared),
    )
