"""The trace context of requests, which the scheduler knows and sends to the workers with its outputs.

vLLM keeps a request's trace headers where it exports traces itself (`--otlp-traces-endpoint`), else none.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from canary_obs.slot_facts import request_name

TRACES_ATTRIBUTE = "kv_canary_traces"  # of SchedulerOutput: traceparent by new request; absent without any
REQUESTS_KEPT = 4096  # a finding may be read after its request has ended
_VERSION_0 = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")  # clients send what they like


def send_traces(scheduler: Any, output: Any) -> None:
    """Let the trace contexts of new requests travel with an output to every worker."""
    if not output.scheduled_new_reqs:
        return
    found = {}
    for new in output.scheduled_new_reqs:
        headers = getattr(scheduler.requests.get(new.req_id), "trace_headers", None)
        if headers is not None and (traceparent := _valid(headers)) is not None:
            found[new.req_id] = traceparent
    if found:
        setattr(output, TRACES_ATTRIBUTE, found)


def _valid(headers: Any) -> str | None:
    given = headers.get("traceparent") if isinstance(headers, Mapping) else None
    return given if isinstance(given, str) and _VERSION_0.fullmatch(given) else None


class TraceContexts:
    """A worker's trace contexts of the latest REQUESTS_KEPT requests that had one."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, str] = OrderedDict()

    def note(self, output: Any) -> None:
        """Follow a scheduler output."""
        for request, traceparent in (getattr(output, TRACES_ATTRIBUTE, None) or {}).items():
            name = request_name(request)
            self._by_name[name] = traceparent
            self._by_name.move_to_end(name)
        while len(self._by_name) > REQUESTS_KEPT:
            self._by_name.popitem(last=False)

    def get(self, name: str) -> str | None:
        """By the name that violations report."""
        return self._by_name.get(name)
