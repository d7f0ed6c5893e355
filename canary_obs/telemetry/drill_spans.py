"""Spans of a drill that has ended: one for the drill, one per rank."""

from __future__ import annotations

from opentelemetry.trace import SpanContext, Status, StatusCode

from canary_obs.hub.drills import DrillRecord, RankDrill
from canary_obs.telemetry.spans import SpanMaker, caller_of, span_context_of
from canary_obs.telemetry.sweep_spans import IdentityOf
from canary_obs.vocabulary import DrillOutcome

# The first of these that any rank has is the drill's outcome.
_PRECEDENCE = (DrillOutcome.MISSED, DrillOutcome.UNANSWERED, DrillOutcome.REFUSED, DrillOutcome.DETECTED)
_ERRORS = frozenset({DrillOutcome.MISSED, DrillOutcome.UNANSWERED})


def export_drill(spans: SpanMaker, record: DrillRecord, identity_of: IdentityOf) -> None:
    """Export all spans of a drill; nothing for one that no rank took part in."""
    if not record.ranks:
        return
    outcome = min((part.finding.outcome for part in record.ranks), key=_PRECEDENCE.index)
    fields: dict[str, str | int] = {
        "kv_canary.drill.id": record.id,
        "kv_canary.drill.outcome": outcome.value,
        "kv_canary.drill.ranks": len(record.ranks),
    }
    if outcome in _ERRORS:
        fields["error.type"] = outcome.value
    root = spans.start(
        "kv_canary.drill",
        record.requested_ns,
        span_context=span_context_of("drill", record.id),
        parent=caller_of(record.traceparent),
        attributes=fields,
    )
    for part in record.ranks:
        _export_rank(spans, record, part, root.get_span_context(), identity_of)
    if outcome in _ERRORS:
        root.set_status(Status(StatusCode.ERROR, outcome.value))
    root.end(end_time=record.ended_ns)


def _export_rank(
    spans: SpanMaker, record: DrillRecord, part: RankDrill, parent: SpanContext, identity_of: IdentityOf
) -> None:
    finding = part.finding
    span = spans.start(
        "kv_canary.drill.rank",
        record.requested_ns,
        rank=identity_of(part.key),
        parent=parent,
        attributes={
            "kv_canary.drill.id": record.id,
            "kv_canary.drill.outcome": finding.outcome.value,
            "kv_canary.group": finding.group,
            "kv_canary.slot": finding.slot,
            "kv_canary.phase": finding.phase.value if finding.phase else None,
            "kv_canary.reason": finding.reason.value if finding.reason else None,
            "kv_canary.latency_steps": finding.latency_steps,
            "kv_canary.latency_ms": finding.latency_ms,
            "kv_canary.drill.error": finding.error,
            "error.type": finding.outcome.value if finding.outcome in _ERRORS else None,
        },
    )
    if finding.outcome in _ERRORS:
        span.set_status(Status(StatusCode.ERROR, finding.error or finding.outcome.value))
    span.end(end_time=part.reported_ns or record.ended_ns)
