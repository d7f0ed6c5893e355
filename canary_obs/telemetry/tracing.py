"""Exports OpenTelemetry spans of sweeps, drills and incidents, and a log record per violation."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from enum import Enum

from opentelemetry.sdk.trace import ReadableSpan

from canary_obs.hub.hub import Hub
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.records import Identity, RankKey
from canary_obs.telemetry.drill_spans import export_drill
from canary_obs.telemetry.export_queue import ExportCounts, ExportQueue
from canary_obs.telemetry.heal_spans import export_heal
from canary_obs.telemetry.incident_spans import IncidentSpans
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
from canary_obs.telemetry.spans import SpanMaker, log_record, rank_resource, span_context_of
from canary_obs.telemetry.sweep_spans import export_sweep

POLL_SECONDS = 0.5
CLOSE_SECONDS = 3.0


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
        self._incidents = None if self._spans is None else IncidentSpans(self._spans, hub.sweep)
        self._known_incidents: set[str] = set()
        self._exported_sweeps: dict[str, frozenset[RankKey]] = {}  # their ranks, by id
        self._exported_drills: set[str] = set()
        self._exported_heals = 0  # number of the newest one
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
        if self._incidents is not None:
            self._incidents.close()

    def _poll_guarded(self) -> None:
        try:
            if self._spans is not None and self._incidents is not None:
                self._poll(self._spans, self._incidents)
        except Exception as error:  # noqa: BLE001 - counted, so that a failure does not look like a quiet fleet
            self._hub.fault("tracing", error)

    def _poll(self, spans: SpanMaker, incidents: IncidentSpans) -> None:
        records = self._hub.sweeps()
        for record in reversed(records):
            known = self._exported_sweeps.get(record.id, frozenset())
            if record.ended_ns is not None and len(record.ranks) > len(known):
                export_sweep(spans, record, self._identity, known)
                self._exported_sweeps[record.id] = frozenset(part.key for part in record.ranks)
        kept = {record.id for record in records}
        self._exported_sweeps = {one: ranks for one, ranks in self._exported_sweeps.items() if one in kept}
        drills = self._hub.drills.ended()
        for drill in drills:
            if drill.id not in self._exported_drills:
                export_drill(spans, drill, self._identity)
        self._exported_drills = {drill.id for drill in drills}
        summaries = self._hub.incidents.newest_first()
        for summary in reversed(summaries):
            if incidents.is_open(summary.id) or summary.id not in self._known_incidents:
                incident = self._hub.incidents.find(summary.id)
                if incident is not None:
                    incidents.update(incident)
        self._known_incidents = {summary.id for summary in summaries}
        for heal in self._hub.heals.after(self._exported_heals):
            export_heal(spans, heal)
            self._exported_heals = heal.number

    def _identity(self, key: RankKey) -> Identity | None:
        return next((rank.identity for rank in self._hub.ranks() if rank.identity.key == key), None)

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
