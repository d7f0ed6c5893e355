"""What the hub knows, as OpenTelemetry: spans of sweeps and incidents, one log record per violation."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Span, Status, StatusCode

from canary_obs.hub.hub import Hub
from canary_obs.hub.incident_store import Incident
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.records import Evidence, Identity
from canary_obs.telemetry.export_queue import ExportCounts, ExportQueue
from canary_obs.telemetry.log import violation_fields
from canary_obs.telemetry.otlp import (
    LOGS,
    TRACES,
    Exporter,
    Signal,
    enabled,
    limits_of,
    open_exporter,
    service_resource,
)
from canary_obs.telemetry.spans import SpanMaker, link_to, log_record, place_of, rank_resource
from canary_obs.telemetry.sweep_spans import tell_sweep
from canary_obs.vocabulary import Plane

LOOK_SECONDS = 0.5
CLOSE_SECONDS = 3.0
LINKS_KEPT = 32


@dataclass(slots=True, kw_only=True)
class _Open:
    """An incident whose span has not ended. `linked` names the sweeps and steps it points to."""

    span: Span
    last_ns: int
    linked: set[str] = field(default_factory=set)
    evidence: int = 0


class Tracing:
    """A thread that looks at the hub now and then; the hub never waits for it, nor does an engine."""

    def __init__(self, hub: Hub, environ: Mapping[str, str]) -> None:
        """Raises ConfigurationError for variables it cannot obey, before anything runs."""
        self._hub = hub
        self._resource = service_resource()
        traces, logs = self._exporter(TRACES, environ), self._exporter(LOGS, environ)
        self._exporters = [one for one in (traces, logs) if one is not None]
        self._queues: dict[str, ExportQueue[ReadableSpan] | ExportQueue[ViolationEvent]] = {}
        self._spans: SpanMaker | None = None
        self._logs: ExportQueue[ViolationEvent] | None = None
        if traces is not None:
            queue = ExportQueue[ReadableSpan](
                "traces", lambda batch: _taken(traces.export(batch)), limits_of(TRACES, environ)
            )
            self._queues["traces"], self._spans = queue, SpanMaker(self._resource, queue)
        if logs is not None:
            self._logs = ExportQueue[ViolationEvent](
                "logs", lambda batch: _taken(logs.export(self._records(batch))), limits_of(LOGS, environ)
            )
            self._queues["logs"] = self._logs
        self._open: dict[str, _Open] = {}
        self._known_incidents: set[str] = set()
        self._told_sweeps: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canary-tracing", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> dict[str, ExportCounts]:
        """What became of spans and log records, by signal."""
        return {signal: queue.counts for signal, queue in self._queues.items()}

    def __call__(self, events: tuple[ViolationEvent, ...]) -> None:
        """A hub subscriber: queue one log record per event."""
        if self._logs is not None:
            for event in events:
                self._logs.put(event)

    def close(self) -> None:
        """Look once more, end open spans, give the queues a moment, then give up. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        deadline = time.monotonic() + CLOSE_SECONDS
        for waiting in self._queues.values():
            waiting.close(max(0.0, deadline - time.monotonic()))
        for exporter in self._exporters:
            exporter.shutdown()

    @staticmethod
    def _exporter(signal: Signal, environ: Mapping[str, str]) -> Exporter | None:
        if not enabled(signal, environ):
            return None
        limits_of(signal, environ)
        return open_exporter(signal, environ)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self._look_guarded()
        self._look_guarded()
        for case in self._open.values():
            case.span.set_attribute("kv_canary.incident.open", True)
            case.span.end(end_time=case.last_ns)

    def _look_guarded(self) -> None:
        try:
            if self._spans is not None:
                self._look(self._spans)
        except Exception as error:  # noqa: BLE001 - tracing that dies silently would look like a quiet fleet
            self._hub.fault("tracing", error)

    def _look(self, spans: SpanMaker) -> None:
        records = self._hub.sweeps()
        for record in reversed(records):
            if record.ended_ns is not None and record.id not in self._told_sweeps:
                tell_sweep(spans, record, self._identity)
                self._told_sweeps.add(record.id)
        self._told_sweeps &= {record.id for record in records}
        summaries = self._hub.incidents.newest_first()
        for summary in reversed(summaries):
            if summary.id in self._open or summary.id not in self._known_incidents:
                incident = self._hub.incidents.find(summary.id)
                if incident is not None:
                    self._follow(spans, incident)
        self._known_incidents = {summary.id for summary in summaries}

    def _identity(self, key: tuple[str, str, int]) -> Identity | None:
        return next((rank.identity for rank in self._hub.ranks() if rank.identity.key == key), None)

    # Incidents.

    def _follow(self, spans: SpanMaker, incident: Incident) -> None:
        case = self._open.get(incident.id)
        if case is None:
            span = spans.start(
                "kv_canary.incident",
                incident.opened_ns,
                place=place_of("incident", incident.id),
                attributes={
                    "kv_canary.incident.id": incident.id,
                    "kv_canary.engine": incident.engine,
                    "kv_canary.instance": incident.instance,
                },
            )
            case = self._open[incident.id] = _Open(span=span, last_ns=incident.last_ns)
        case.last_ns = incident.last_ns
        for event in (*incident.first, *incident.latest):
            self._link(spans, case, event)
        for evidence in incident.evidence[case.evidence :]:
            self._tell_evidence(spans, case, evidence)
        case.evidence = len(incident.evidence)
        if incident.closed_ns is not None:
            _close(case.span, incident)
            del self._open[incident.id]

    def _link(self, spans: SpanMaker, case: _Open, event: ViolationEvent) -> None:
        row, who = event.violation, event.identity
        kind = "sweep" if row.sweep_id is not None else "step"
        name = row.sweep_id or f"{who.engine} {who.instance} {who.rank} {who.started_ns} {row.step}"
        if name in case.linked or len(case.linked) >= LINKS_KEPT:
            return
        case.linked.add(name)
        link = link_to(place_of(kind, name), rank=who.rank, step=row.step, phase=row.phase.value)
        case.span.add_link(link.context, link.attributes)
        if kind == "step":
            fields = {"kv_canary.step": row.step, "kv_canary.phase": row.phase.value}
            place = place_of("step", name)
            span = spans.start("kv_canary.step", row.time_ns, rank=who, place=place, attributes=fields)
            span.set_status(Status(StatusCode.ERROR, "violations"))
            span.end(end_time=row.time_ns)

    def _tell_evidence(self, spans: SpanMaker, case: _Open, evidence: Evidence) -> None:
        fields: dict[str, str | int | bool | None] = {
            "kv_canary.group": evidence.group,
            "kv_canary.slot": evidence.slot.slot,
            "kv_canary.position": evidence.slot.position,
            "kv_canary.record.state": evidence.slot.state.value,
            "kv_canary.intact": evidence.slot.intact,
            "kv_canary.step": evidence.step,
            "kv_canary.holders": len(evidence.holders),
        }
        for change in evidence.changed:
            at = f"layer {change.layer} head {change.head} element {change.element}"
            at += " of the scales" if change.plane is Plane.SCALES else ""
            fields[f"kv_canary.changed.{change.part.value}"] = at
        parent = case.span.get_span_context()
        span = spans.start(
            "kv_canary.evidence", evidence.time_ns, rank=evidence.identity, parent=parent, attributes=fields
        )
        span.end(end_time=evidence.time_ns)

    # Logs.

    def _records(self, batch: Sequence[ViolationEvent]) -> list[object]:
        return [
            log_record(
                rank_resource(self._resource, event.identity),
                place_of("incident", event.incident),
                "kv_canary.violation",
                event.violation.time_ns,
                {f"kv_canary.{name}": value for name, value in violation_fields(event).items()},
            )
            for event in batch
        ]


def open_tracing(hub: Hub, environ: Mapping[str, str] | None = None) -> Tracing | None:
    """Tracing by the OTEL_* variables; None when they ask for nothing. Raises ConfigurationError."""
    environ = os.environ if environ is None else environ
    wanted = [signal for signal in (TRACES, LOGS) if enabled(signal, environ)]
    return Tracing(hub, environ) if wanted else None


def _taken(result: object) -> bool:
    return getattr(result, "name", "") == "SUCCESS"


def _close(span: Span, incident: Incident) -> None:
    span.set_attributes(
        {
            "kv_canary.violations": incident.violations,
            "kv_canary.reasons": tuple(sorted(reason.value for reason in incident.reasons)),
            "kv_canary.groups": incident.groups,
            "kv_canary.ranks": incident.ranks,
            "kv_canary.acknowledged": incident.acknowledged,
        }
    )
    span.set_status(Status(StatusCode.ERROR, f"{incident.violations} violations"))
    span.end(end_time=incident.last_ns)
