"""Trace contexts of SGLang's requests, without an SGLang; with one: real/test_request_traces.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from canary_obs.engines.sglang import request_traces
from canary_obs.engines.sglang.request_traces import RequestTraces
from canary_obs.engines.toolkit.method_patches import MethodPatches

_SPAN = trace.SpanContext(0xAB, 0xCD, is_remote=True, trace_flags=trace.TraceFlags(1))
_CONTEXT = trace.set_span_in_context(trace.NonRecordingSpan(_SPAN))


@pytest.fixture(autouse=True)
def _propagator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_traces, "_propagator", TraceContextTextMapPropagator)


class Scheduler:
    """As far as its requests come to it."""

    def __init__(self, enable_trace: bool | None) -> None:
        known = {} if enable_trace is None else {"enable_trace": enable_trace}
        self.server_args = SimpleNamespace(**known)
        self.queued: list[tuple[str, bool]] = []

    def _add_request_to_queue(self, request: Any, is_retracted: bool = False) -> None:
        self.queued.append((request.rid, is_retracted))


class Observer:
    def fault(self, part: str, error: Exception) -> None:
        raise error


def _request(context: Any, *, traced: bool = True) -> Any:
    return SimpleNamespace(
        rid="a",
        time_stats=SimpleNamespace(
            trace_ctx=SimpleNamespace(tracing_enable=traced, root_span_context=context)
        ),
    )


def test_the_span_of_a_request_is_kept() -> None:
    scheduler, traces, patches = Scheduler(enable_trace=True), RequestTraces(), MethodPatches()
    traces.wrap(patches, scheduler, Observer())  # type: ignore[arg-type]
    scheduler._add_request_to_queue(_request(_CONTEXT), is_retracted=True)
    assert traces.get("a") == f"00-{0xAB:032x}-{0xCD:016x}-01"
    assert scheduler.queued == [("a", True)]
    patches.restore()
    assert "_add_request_to_queue" not in vars(scheduler)


@pytest.mark.parametrize(
    "request_", [SimpleNamespace(rid="a"), _request(None), _request(_CONTEXT, traced=False)]
)
def test_a_request_that_is_not_traced_has_none(request_: Any) -> None:
    """Not that of another span that happens to be the current one."""
    scheduler, traces = Scheduler(enable_trace=True), RequestTraces()
    traces.wrap(MethodPatches(), scheduler, Observer())  # type: ignore[arg-type]
    with trace.use_span(trace.NonRecordingSpan(_SPAN)):
        scheduler._add_request_to_queue(request_)
    assert traces.get("a") is None


@pytest.mark.parametrize("enable_trace", [None, False])
def test_a_scheduler_that_traces_nothing_is_left_alone(enable_trace: bool | None) -> None:
    scheduler = Scheduler(enable_trace)
    RequestTraces().wrap(MethodPatches(), scheduler, Observer())  # type: ignore[arg-type]
    assert "_add_request_to_queue" not in vars(scheduler)


def test_nor_is_one_without_open_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_traces, "_propagator", lambda: None)
    scheduler = Scheduler(enable_trace=True)
    RequestTraces().wrap(MethodPatches(), scheduler, Observer())  # type: ignore[arg-type]
    assert "_add_request_to_queue" not in vars(scheduler)
