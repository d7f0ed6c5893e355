"""Exports OpenTelemetry spans of sweeps and incidents, and a log record per violation."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Span, Status, StatusCode

from canary_obs.hub.hub import Hub
from canary_obs.hub.incident_store import Incident
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.records import Evidence, Identity, RankKey
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
from canary_obs.telemetry.spans import SpanMaker, link_to, log_record, rank_resource, span_context_of
from canary_obs.telemetry.sweep_spans import export_sweep
from canary_obs.vocabulary import Plane

POLL_SECONDS = 0.5
CLOSE_SECONDS = 3.0
LINKS_KEPT = 32


@dataclass(slots=True, kw_only=True)
class _OpenIncident:
    """An incident whose span has not ended."""

    span: Span
    last_ns: int
    linked: set[str] = field(default_factory=set)  # names of the sweeps and steps that the span links to
    evidence: int = 0  # exported so far


class Tracing:
    """A thread that polls the hub every POLL_SECONDS. Neither the hub nor an engine waits for it."""

    def __init__(self, hub: Hub, environ: Mapping[str, str]) -> None:
        """Raises ConfigurationError for OTEL_* variables with unusable values, before anything runs."""
        self._hub = hub
        self._resource = service_resource()
        traces, logs = self._exporter(TRACES, environ), self._exporter(LOGS, environ)
        self._exporters = [one for one in (traces, logs) if one is not None]
        self._queues: dict[str, ExportQueue[ReadableSpan] | ExportQueue[ViolationEvent]] = {}
        self._spans: SpanMaker | None = None
        self._logs: ExportQueue[ViolationEvent] | None = None
        if traces is not None:
            queue = ExportQueue[ReadableSpan](
                "traces", lambda batch: _delivered(traces.export(batch)), limits_of(TRACES, environ)
            )
            self._queues["traces"], self._spans = queue, SpanMaker(self._resource, queue)
        if logs is not None:
            self._logs = ExportQueue[ViolationEvent](
                "logs", lambda batch: _delivered(logs.export(self._records(batch))), limits_of(LOGS, environ)
            )
            self._queues["logs"] = self._logs
        self._open: dict[str, _OpenIncident] = {}
        self._known_incidents: set[str] = set()
        self._exported_sweeps: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canary-tracing", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> dict[str, ExportCounts]:
        """Spans and log records exported and lost, by signal."""
        return {signal: queue.counts for signal, queue in self._queues.items()}

    def __call__(self, events: tuple[ViolationEvent, ...]) -> None:
        """As a hub subscriber: queue one log record per event."""
        if self._logs is not None:
            for event in events:
                self._logs.put(event)

    def close(self) -> None:
        """Poll once more, end open spans, and export for at most CLOSE_SECONDS. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        deadline = time.monotonic() + CLOSE_SECONDS
        for queue in self._queues.values():
            queue.close(max(0.0, deadline - time.monotonic()))
        for exporter in self._exporters:
            exporter.shutdown()

    @staticmethod
    def _exporter(signal: Signal, environ: Mapping[str, str]) -> Exporter | None:
        if not enabled(signal, environ):
            return None
        limits_of(signal, environ)
        return open_exporter(signal, environ)

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._poll_guarded()
        self._poll_guarded()
        for tracked in self._open.values():
            tracked.span.set_attribute("kv_canary.incident.open", True)
            tracked.span.end(end_time=tracked.last_ns)

    def _poll_guarded(self) -> None:
        try:
            if self._spans is not None:
                self._poll(self._spans)
        except Exception as error:  # noqa: BLE001 - counted, so that a failure does not look like a quiet fleet
            self._hub.fault("tracing", error)

    def _poll(self, spans: SpanMaker) -> None:
        records = self._hub.sweeps()
        for record in reversed(records):
            if record.ended_ns is not None and record.id not in self._exported_sweeps:
                export_sweep(spans, record, self._identity)
                self._exported_sweeps.add(record.id)
        self._exported_sweeps &= {record.id for record in records}
        summaries = self._hub.incidents.newest_first()
        for summary in reversed(summaries):
            if summary.id in self._open or summary.id not in self._known_incidents:
                incident = self._hub.incidents.find(summary.id)
                if incident is not None:
                    self._update_incident(spans, incident)
        self._known_incidents = {summary.id for summary in summaries}

    def _identity(self, key: RankKey) -> Identity | None:
        return next((rank.identity for rank in self._hub.ranks() if rank.identity.key == key), None)

    def _update_incident(self, spans: SpanMaker, incident: Incident) -> None:
        tracked = self._open.get(incident.id)
        if tracked is None:
            span = spans.start(
                "kv_canary.incident",
                incident.opened_ns,
                span_context=span_context_of("incident", incident.id),
                attributes={
                    "kv_canary.incident.id": incident.id,
                    "kv_canary.engine": incident.engine,
                    "kv_canary.instance": incident.instance,
                },
            )
            tracked = self._open[incident.id] = _OpenIncident(span=span, last_ns=incident.last_ns)
        tracked.last_ns = incident.last_ns
        for event in (*incident.first, *incident.latest):
            self._link_event(spans, tracked, event)
        for evidence in incident.evidence[tracked.evidence :]:
            self._export_evidence(spans, tracked, evidence)
        tracked.evidence = len(incident.evidence)
        if incident.closed_ns is not None:
            _end_span(tracked.span, incident)
            del self._open[incident.id]

    def _link_event(self, spans: SpanMaker, tracked: _OpenIncident, event: ViolationEvent) -> None:
        row, who = event.violation, event.identity
        kind = "sweep" if row.sweep_id is not None else "step"
        name = row.sweep_id or f"{who.engine} {who.instance} {who.rank} {who.started_ns} {row.step}"
        if name in tracked.linked or len(tracked.linked) >= LINKS_KEPT:
            return
        tracked.linked.add(name)
        link = link_to(span_context_of(kind, name), rank=who.rank, step=row.step, phase=row.phase.value)
        tracked.span.add_link(link.context, link.attributes)
        if kind == "step":
            fields: dict[str, str | int] = {
                "kv_canary.step": row.step,
                "kv_canary.phase": row.phase.value,
            }
            span = spans.start(
                "kv_canary.step",
                row.time_ns,
                rank=who,
                span_context=span_context_of(kind, name),
                attributes=fields,
            )
            span.set_status(Status(StatusCode.ERROR, "violations"))
            span.end(end_time=row.time_ns)

    def _export_evidence(self, spans: SpanMaker, tracked: _OpenIncident, evidence: Evidence) -> None:
        fields: dict[str, str | int | bool | None] = {
            "kv_canary.group": evidence.group,
            "kv_canary.slot": evidence.slot.slot,
            "kv_canary.position": evidence.slot.position,
            "kv_canary.record.state": evidence.slot.state.value if evidence.slot.state else "damaged",
            "kv_canary.intact": evidence.slot.intact,
            "kv_canary.step": evidence.step,
            "kv_canary.holders": len(evidence.holders),
        }
        for change in evidence.changed:
            location = f"layer {change.layer} head {change.head} element {change.element}"
            location += " of the scales" if change.plane is Plane.SCALES else ""
            fields[f"kv_canary.changed.{change.part.value}"] = location
        parent = tracked.span.get_span_context()
        span = spans.start(
            "kv_canary.evidence", evidence.time_ns, rank=evidence.identity, parent=parent, attributes=fields
        )
        span.end(end_time=evidence.time_ns)

    def _records(self, batch: Sequence[ViolationEvent]) -> list[object]:
        return [
            log_record(
                rank_resource(self._resource, event.identity),
                span_context_of("incident", event.incident),
                "kv_canary.violation",
                event.violation.time_ns,
                {f"kv_canary.{name}": value for name, value in violation_fields(event).items()},
            )
            for event in batch
        ]


def open_tracing(hub: Hub, environ: Mapping[str, str] | None = None) -> Tracing | None:
    """Start tracing as the OTEL_* variables say; None = they enable nothing. Raises ConfigurationError."""
    environ = os.environ if environ is None else environ
    signals = [signal for signal in (TRACES, LOGS) if enabled(signal, environ)]
    return Tracing(hub, environ) if signals else None


def _delivered(result: Enum) -> bool:
    return result.name == "SUCCESS"


def _end_span(span: Span, incident: Incident) -> None:
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
