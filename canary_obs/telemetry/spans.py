"""Spans and log records with ids derived from names, so that they can be linked before they exist."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import HOST_NAME, SERVICE_INSTANCE_ID, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from canary_obs import __version__
from canary_obs.hub.incidents import trace_id_of
from canary_obs.hub.ranks import rank_name
from canary_obs.records import Identity
from canary_obs.telemetry.export_queue import ExportQueue

SCOPE = "canary_obs"
RESOURCES_KEPT = 1024
_PROPAGATOR = TraceContextTextMapPropagator()
Attributes = Mapping[str, str | int | float | bool | tuple[str, ...] | tuple[int, ...] | None]


def span_context_of(kind: str, name: str) -> SpanContext:
    """Trace and span id of an incident, sweep or step, derived from kind and name."""
    return SpanContext(
        trace_id=int(trace_id_of(kind, name), 16),
        span_id=int(trace_id_of(f"{kind} span", name)[:16], 16) or 1,
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def caller_of(traceparent: str | None) -> SpanContext | None:
    """The span that a W3C `traceparent` names; None without one, and for one that is not valid."""
    if traceparent is None:
        return None
    found = _PROPAGATOR.extract({"traceparent": traceparent}, Context())
    context = trace.get_current_span(found).get_span_context()
    return context if context.is_valid else None


def link_to(span_context: SpanContext, **attributes: str | int) -> Link:
    """A link to a span, which need not exist yet."""
    return Link(span_context, {f"kv_canary.{name}": value for name, value in attributes.items()})


class _PresetIds(IdGenerator):
    """Generates the ids of `preset` while it is set, else random ones. Not thread-safe."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.preset: SpanContext | None = None

    def generate_trace_id(self) -> int:
        """The preset trace id, or a random one."""
        return self.preset.trace_id if self.preset else self._random.generate_trace_id()

    def generate_span_id(self) -> int:
        """The preset span id, or a random one."""
        return self.preset.span_id if self.preset else self._random.generate_span_id()


class _ToQueue(SpanProcessor):
    def __init__(self, queue: ExportQueue[ReadableSpan]) -> None:
        self._queue = queue

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a sampled span."""
        if span.context is not None and span.context.trace_flags.sampled:
            self._queue.put(span)


class SpanMaker:
    """Starts spans under the resource of a rank or of the service; all end in one queue. Not thread-safe."""

    def __init__(self, service: Resource, queue: ExportQueue[ReadableSpan]) -> None:
        self._service, self._queue = service, queue
        self._ids = _PresetIds()
        self._tracers: dict[Identity | None, trace.Tracer] = {}

    def start(
        self,
        name: str,
        at_ns: int,
        *,
        rank: Identity | None = None,
        span_context: SpanContext | None = None,
        parent: SpanContext | None = None,
        attributes: Attributes | None = None,
    ) -> Span:
        """A span of a rank (None = of the service) that starts at `at_ns`.

        `span_context` sets the ids; without it they are random. Below `parent` the trace is the parent's.
        """
        self._ids.preset = span_context
        context = (
            Context() if parent is None else trace.set_span_in_context(NonRecordingSpan(parent), Context())
        )
        try:
            return self._tracer(rank).start_span(
                name, context, start_time=at_ns, attributes=present(attributes or {})
            )
        finally:
            self._ids.preset = None

    def _tracer(self, rank: Identity | None) -> trace.Tracer:
        if rank not in self._tracers:
            if len(self._tracers) >= RESOURCES_KEPT:
                self._tracers.clear()
            provider = TracerProvider(
                resource=self._service if rank is None else rank_resource(self._service, rank),
                id_generator=self._ids,
                shutdown_on_exit=False,
            )
            provider.add_span_processor(_ToQueue(self._queue))
            self._tracers[rank] = provider.get_tracer(SCOPE, __version__)
        return self._tracers[rank]


def rank_resource(service: Resource, rank: Identity) -> Resource:
    """The service's resource with the rank as its service.instance.id."""
    # The service's host is not the rank's.
    shared = {name: value for name, value in service.attributes.items() if name != HOST_NAME}
    return Resource(shared, service.schema_url).merge(
        Resource(
            {
                SERVICE_INSTANCE_ID: rank_name(rank.key),
                "process.pid": rank.pid,
                "kv_canary.engine": rank.engine,
                "kv_canary.instance": rank.instance,
                "kv_canary.rank": rank.rank,
                "kv_canary.device": rank.device,
            }
        )
    )


def present(
    attributes: Attributes,
) -> dict[str, str | int | float | bool | tuple[str, ...] | tuple[int, ...]]:
    """The attributes that have a value: OTLP has no null."""
    return {name: value for name, value in attributes.items() if value is not None}


def log_record(
    resource: Resource, span_context: SpanContext, event: str, time_ns: int, fields: Attributes
) -> ReadableLogRecord:
    """A log record of severity ERROR in the context of a span."""
    record = LogRecord(
        timestamp=time_ns,
        context=trace.set_span_in_context(NonRecordingSpan(span_context), Context()),
        severity_number=SeverityNumber.ERROR,
        severity_text="ERROR",
        body=event,
        attributes=present(fields),
        event_name=event,
    )
    return ReadableLogRecord(record, resource, InstrumentationScope(SCOPE, __version__))
