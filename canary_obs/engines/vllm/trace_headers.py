"""The trace context of requests, which the scheduler knows and sends to the workers with its outputs.

vLLM keeps a request's trace headers where it exports traces itself (`--otlp-traces-endpoint`), else none.
"""

from __future__ import annotations

from typing import Any

from canary_obs.engines.toolkit.trace_contexts import TraceContexts, traceparent_of

TRACES_ATTRIBUTE = "kv_canary_traces"  # of SchedulerOutput: traceparent by new request; absent without any


def send_traces(scheduler: Any, output: Any) -> None:
    """Let the trace contexts of new requests travel with an output to every worker."""
    if not output.scheduled_new_reqs:
        return
    found = {}
    for new in output.scheduled_new_reqs:
        headers = getattr(scheduler.requests.get(new.req_id), "trace_headers", None)
        if headers is not None and (traceparent := traceparent_of(headers)) is not None:
            found[new.req_id] = traceparent
    if found:
        setattr(output, TRACES_ATTRIBUTE, found)


class SentTraces(TraceContexts):
    """Those that a worker was sent."""

    def note(self, output: Any) -> None:
        """Follow a scheduler output."""
        for request, traceparent in (getattr(output, TRACES_ATTRIBUTE, None) or {}).items():
            self.keep(request, traceparent)
