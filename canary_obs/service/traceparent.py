"""The header `traceparent`: the caller's span, https://www.w3.org/TR/trace-context/."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Header

TraceParent = Annotated[str | None, Header(description="W3C trace context of the caller.")]
_VERSION_0 = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")  # the version that we know


def valid_or_none(traceparent: str | None) -> str | None:
    """The header if it is one that we know how to read."""
    return traceparent if traceparent and _VERSION_0.fullmatch(traceparent) else None
