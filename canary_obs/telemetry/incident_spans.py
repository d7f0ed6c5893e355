"""Spans of incidents: one that leaves when an incident opens, one when it has ended, and its evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode

from canary_obs.hub.incidents import Incident
from canary_obs.hub.sweep_records import SweepRecord
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.plurals import counted
from canary_obs.records import Evidence
from canary_obs.telemetry.log import violation_fields
from canary_obs.telemetry.spans import SpanMaker, caller_of, link_to, present, span_context_of
from canary_obs.telemetry.sweep_spans import sweep_context
from canary_obs.vocabulary import Plane

LINKS_KEPT = 32  # of each span
EVENTS_KEPT = 32
# Looks up a sweep; None = it is not kept any more.
SweepOf = Callable[[str], SweepRecord | None]


@dataclass(slots=True, kw_only=True)
class _OpenIncident:
    """An incident whose first span has left."""

    latest: Incident
    context: SpanContext
    linked: set[str] = field(default_factory=set)  # names of what spans link to: sweeps, steps, callers
    sent: set[int] = field(default_factory=set)  # numbers of the violations that are events of the first span
    evidence: int = 0  # exported so far


class IncidentSpans:
    """`kv_canary.incident` is short and leaves at once: a span that has begun cannot be exported.

    Its child `kv_canary.incident.end` lasts as long as the incident, and leaves when that has ended or the
    service stops. Violations are span events of the one that leaves next. Not thread-safe.
    """

    def __init__(self, spans: SpanMaker, sweep_of: SweepOf) -> None:
        self._spans, self._sweep_of = spans, sweep_of
        self._open: dict[str, _OpenIncident] = {}

    def is_open(self, incident: str) -> bool:
        """Whether its last span has not left yet."""
        return incident in self._open

    def update(self, incident: Incident) -> None:
        """Export what is new of an incident."""
        tracked = self._open.get(incident.id)
        if tracked is None:
            context = span_context_of("incident", incident.id)
            tracked = self._open[incident.id] = _OpenIncident(latest=incident, context=context)
            self._export(tracked, "kv_canary.incident", incident.last_ns)
        tracked.latest = incident
        for evidence in incident.evidence[tracked.evidence :]:
            self._export_evidence(tracked, evidence)
        tracked.evidence = len(incident.evidence)
        if incident.closed_ns is not None:
            self._end(tracked)
            del self._open[incident.id]

    def close(self) -> None:
        """Export the last span of each incident that is open; `kv_canary.incident.open` says so."""
        for tracked in self._open.values():
            self._end(tracked)
        self._open.clear()

    def _end(self, tracked: _OpenIncident) -> None:
        self._export(tracked, "kv_canary.incident.end", tracked.latest.last_ns, parent=tracked.context)

    def _export(
        self, tracked: _OpenIncident, name: str, ended_ns: int, parent: SpanContext | None = None
    ) -> None:
        incident = tracked.latest
        reasons = sorted(reason.value for reason in incident.reasons)
        span = self._spans.start(
            name,
            incident.opened_ns,
            span_context=tracked.context if parent is None else None,
            parent=parent,
            attributes={
                "kv_canary.incident.id": incident.id,
                "kv_canary.incident.open": incident.closed_ns is None,
                "kv_canary.engine": incident.engine,
                "kv_canary.instance": incident.instance,
                "kv_canary.violations": incident.violations,
                "kv_canary.reasons": tuple(reasons),
                "kv_canary.groups": incident.groups,
                "kv_canary.ranks": incident.ranks,
                "kv_canary.acknowledged": incident.acknowledged,
                "error.type": reasons[0] if reasons else None,
            },
        )
        links = 0
        for event in sorted({*incident.first, *incident.latest}, key=lambda event: event.number):
            if links < LINKS_KEPT:
                for link in self._links(tracked, event):
                    span.add_link(link.context, link.attributes)
                    links += 1
            self._add_event(tracked, span, event)
        span.set_status(Status(StatusCode.ERROR, counted(incident.violations, "violation")))
        span.end(end_time=ended_ns)

    @staticmethod
    def _add_event(tracked: _OpenIncident, span: Span, event: ViolationEvent) -> None:
        if event.number in tracked.sent or len(tracked.sent) >= 2 * EVENTS_KEPT:
            return
        tracked.sent.add(event.number)
        fields = {f"kv_canary.{name}": value for name, value in violation_fields(event).items()}
        span.add_event("kv_canary.violation", present(fields), event.violation.time_ns)

    def _links(self, tracked: _OpenIncident, event: ViolationEvent) -> Iterator[Link]:
        if (link := self._link(tracked, event)) is not None:
            yield link
        row = event.violation
        if row.traceparent is None or row.traceparent in tracked.linked:
            return
        if (caller := caller_of(row.traceparent)) is not None:
            tracked.linked.add(row.traceparent)
            yield link_to(caller, request=row.request or "")

    def _link(self, tracked: _OpenIncident, event: ViolationEvent) -> Link | None:
        """To the sweep or the step that found it; None = the incident is linked to it already."""
        row, who = event.violation, event.identity
        name = row.sweep_id or f"{who.engine} {who.instance} {who.rank} {who.started_ns} {row.step}"
        if name in tracked.linked:
            return None
        tracked.linked.add(name)
        if row.sweep_id is not None:
            context = sweep_context(row.sweep_id, self._sweep_of(row.sweep_id))
            return link_to(context, rank=who.rank, step=row.step, phase=row.phase.value)
        context = span_context_of("step", name)
        step = self._spans.start(
            "kv_canary.step",
            row.time_ns,
            rank=who,
            span_context=context,
            attributes={
                "kv_canary.step": row.step,
                "kv_canary.phase": row.phase.value,
                "error.type": row.reason.value,
            },
        )
        step.set_status(Status(StatusCode.ERROR, "violations"))
        step.end(end_time=row.time_ns)
        return link_to(context, rank=who.rank, step=row.step, phase=row.phase.value)

    def _export_evidence(self, tracked: _OpenIncident, evidence: Evidence) -> None:
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
        span = self._spans.start(
            "kv_canary.evidence",
            evidence.time_ns,
            rank=evidence.identity,
            parent=tracked.context,
            attributes=fields,
        )
        span.end(end_time=evidence.time_ns)
