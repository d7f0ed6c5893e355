"""Query parameters: one that is given twice or that a route does not have is refused."""

from __future__ import annotations

from collections import Counter
from inspect import isclass

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel

from canary_obs.service.problems import Problem


async def _as_declared(request: Request) -> None:
    given = Counter(name for name, _ in request.query_params.multi_items())
    if not given:
        return
    # Only the last one would count.
    twice = sorted(name for name, count in given.items() if count > 1)
    if twice:
        detail = f"query: {', '.join(map(repr, twice))} is given more than once; send each parameter once"
        raise Problem(422, "invalid-request", detail)
    # It would be ignored: a pause of one rank, with the rank in the address, would pause them all.
    known = _names(request.scope["route"])
    unknown = sorted(given.keys() - known)
    if unknown:
        has = f"has {', '.join(sorted(known))}" if known else "has none; what it takes is in the body"
        detail = f"query: {', '.join(map(repr, unknown))} is not a parameter of this route, which {has}"
        raise Problem(422, "invalid-request", detail)


def _names(route: APIRoute) -> set[str]:
    names: set[str] = set()
    for field in route.dependant.query_params:
        kind = field.field_info.annotation
        if isclass(kind) and issubclass(kind, BaseModel):
            names.update(each.alias or name for name, each in kind.model_fields.items())
        else:
            names.add(field.alias)
    return names


AS_DECLARED = (Depends(_as_declared),)  # `dependencies` of a route that changes something or has a query
