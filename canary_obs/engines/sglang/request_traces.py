"""The trace context of requests, as they come to a scheduler that SGLang traces (`--enable-trace`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from canary_obs.engine_api.observer import Observer
from canary_obs.engines.sglang.settings import settings_of
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.toolkit.trace_contexts import TraceContexts, traceparent_of


def _propagator() -> Any:
    """SGLang's own of W3C, None without OpenTelemetry, which the canary does not load into an engine."""
    from sglang.srt.observability.trace import _trace_context_propagator

    return _trace_context_propagator


class RequestTraces(TraceContexts):
    """That of SGLang's own span of a request, whose parent is the one that the client sent, if it did."""

    def wrap(self, patches: MethodPatches, scheduler: Any, observer: Observer) -> None:
        """Note those of requests to come, if they are traced; `patches` undoes that."""
        if (
            not getattr(settings_of(scheduler), "enable_trace", False)
            or (propagator := _propagator()) is None
        ):
            return
        inject = propagator.inject

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def _add_request_to_queue(request: Any, *given: Any, **named: Any) -> Any:
                guarded(observer, "evidence", self._note, request, inject)
                return original(request, *given, **named)

            return _add_request_to_queue

        patches.wrap(scheduler, "_add_request_to_queue", around)

    def _note(self, request: Any, inject: Callable[..., None]) -> None:
        traced: Any = getattr(getattr(request, "time_stats", None), "trace_ctx", None)
        if not getattr(traced, "tracing_enable", False) or traced.root_span_context is None:
            return
        headers: dict[str, str] = {}
        inject(headers, traced.root_span_context)
        if (traceparent := traceparent_of(headers)) is not None:
            self.keep(request.rid, traceparent)
