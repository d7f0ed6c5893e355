"""Where a request of SGLang is in the request table, and how far it is written."""

from __future__ import annotations

from typing import Any


def row_of(request: Any) -> int | None:
    """The request's row in the request table; None = it has none, and no KV."""
    kv = request.kv
    if hasattr(kv, "holds_kv"):
        return kv.req_pool_idx if kv.holds_kv else None
    # SGLang 0.5.16
    return None if kv is None else request.req_pool_idx


def held_row(request: Any) -> int:
    """The same; raises LookupError where it has none."""
    if (row := row_of(request)) is None:
        raise LookupError(f"request {request.rid} has no row in SGLang's request table")
    return row


def tokens_written(request: Any) -> int:
    """Tokens of the prompt that its forwards so far have written, or will have when they are over."""
    end = request.extend_end if hasattr(request, "extend_end") else request.extend_range.end  # SGLang 0.5.16
    return min(int(end), len(request.origin_input_ids))
