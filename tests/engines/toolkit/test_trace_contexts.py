"""Trace contexts that are kept for findings to come."""

from __future__ import annotations

from typing import Any

import pytest

from canary_obs.engines.toolkit.trace_contexts import REQUESTS_KEPT, TraceContexts, traceparent_of
from canary_obs.slot_facts import request_name

CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.mark.parametrize(
    "given",
    [
        None, {}, ["no mapping"], {"tracestate": "v=1"}, {"traceparent": b"00-ab"},
        {"traceparent": "x" * 5000}, {"traceparent": CALLER.upper()}, {"traceparent": f"{CALLER}\n"},
        {"traceparent": f"01{CALLER[2:]}"},
    ],
)  # fmt: skip
def test_headers_without_a_usable_context_have_none(given: Any) -> None:
    assert traceparent_of(given) is None


def test_a_context_is_kept_by_the_name_that_findings_have() -> None:
    contexts, long = TraceContexts(), "x" * 5000
    parent = traceparent_of({"traceparent": CALLER, "tracestate": "v=1"})
    assert parent == CALLER
    contexts.keep(long, parent)
    assert contexts.get(request_name(long)) == CALLER
    assert contexts.get("another") is None


def test_the_latest_requests_are_kept() -> None:
    contexts = TraceContexts()
    for name in ("first", "second", "first"):  # again: the second is the oldest now
        contexts.keep(name, CALLER)
    for number in range(REQUESTS_KEPT - 1):
        contexts.keep(str(number), CALLER)
    assert contexts.get("second") is None
    assert contexts.get("first") == CALLER
