"""The W3C trace contexts that requests came with, for findings that are read after they have ended."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from canary_obs.slot_facts import request_name

REQUESTS_KEPT = 4096
_VERSION_0 = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")  # clients send what they like


def traceparent_of(headers: Any) -> str | None:
    """The `traceparent` of a request's headers; None = it has none, or one that cannot be used."""
    given = headers.get("traceparent") if isinstance(headers, Mapping) else None
    return given if isinstance(given, str) and _VERSION_0.fullmatch(given) else None


class TraceContexts:
    """Of the latest REQUESTS_KEPT requests that had one."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, str] = OrderedDict()

    def keep(self, request: str, traceparent: str) -> None:
        """`request`: the engine's id."""
        name = request_name(request)
        self._by_name[name] = traceparent
        self._by_name.move_to_end(name)
        while len(self._by_name) > REQUESTS_KEPT:
            self._by_name.popitem(last=False)

    def get(self, name: str) -> str | None:
        """By the name that violations report."""
        return self._by_name.get(name)
