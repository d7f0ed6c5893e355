"""Query parameters: one that is given twice is refused, as only the last one would count."""

from __future__ import annotations

from collections import Counter

from fastapi import Depends, Request

from canary_obs.service.problems import Problem


async def _each_once(request: Request) -> None:
    given = Counter(name for name, _ in request.query_params.multi_items())
    twice = sorted(name for name, count in given.items() if count > 1)
    if twice:
        detail = f"query: {', '.join(map(repr, twice))} is given more than once; send each parameter once"
        raise Problem(422, "invalid-request", detail)


EACH_ONCE = (Depends(_each_once),)  # `dependencies` of a route with a query
