"""Spans of a finished sweep: one for the sweep, one per rank, one per group of a rank."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.trace import Span, SpanContext, Status, StatusCode

from canary_obs.hub.sweep_records import RankSweep, SweepRecord
from canary_obs.records import Identity, RankKey
from canary_obs.telemetry.spans import SpanMaker, caller_of, span_context_of
from canary_obs.vocabulary import SweepStatus

_ERRORS = frozenset({SweepStatus.FAILED, SweepStatus.VIOLATED})

# Looks up a rank; None = the hub no longer keeps it.
IdentityOf = Callable[[RankKey], Identity | None]


def sweep_context(sweep_id: str, record: SweepRecord | None) -> SpanContext:
    """Trace and span id of a sweep: in its caller's trace, or in one derived from its id."""
    own = span_context_of("sweep", sweep_id)
    caller = None if record is None else caller_of(record.traceparent)
    if caller is None:
        return own
    return SpanContext(caller.trace_id, own.span_id, is_remote=False, trace_flags=own.trace_flags)


def export_sweep(
    spans: SpanMaker, record: SweepRecord, identity_of: IdentityOf, known: frozenset[RankKey]
) -> None:
    """Export all spans of a sweep that has ended, except those of `known` ranks, which were exported before.

    A rank may report to a new service after the others, when the sweep's own span has left.
    """
    ends = [
        _export_rank(spans, record, part, identity_of(part.key))
        for part in record.ranks
        if part.key not in known
    ]
    if known:
        return
    span_context = sweep_context(record.id, record)
    fields: dict[str, str | bool] = {
        "kv_canary.sweep.id": record.id,
        "kv_canary.sweep.trigger": record.trigger.value,
        "kv_canary.sweep.status": record.status.value,
        "kv_canary.sweep.data": record.data,
    }
    if record.status in _ERRORS:
        fields["error.type"] = record.status.value
    caller = caller_of(record.traceparent)
    root = spans.start(
        "kv_canary.sweep",
        record.requested_ns,
        span_context=span_context,
        parent=caller,
        attributes=fields,
    )
    _set_status(root, record.status, None)
    root.end(end_time=max([record.ended_ns or record.requested_ns, *ends]))


def _export_rank(spans: SpanMaker, record: SweepRecord, part: RankSweep, identity: Identity | None) -> int:
    """Returns when the rank ended the sweep, in ns."""
    ended_ns, progress = record.ended_ns or record.requested_ns, part.progress
    started_ns = progress.started_ns if progress else record.requested_ns
    fields: dict[str, str | int] = {
        "kv_canary.sweep.id": record.id,
        "kv_canary.sweep.status": part.status.value,
    }
    if progress is not None:
        ended_ns = progress.started_ns + round(progress.seconds * 1e9)
        fields |= {
            "kv_canary.step": progress.step,
            "kv_canary.slots.total": progress.total,
            "kv_canary.slots.checked": progress.checked,
            "kv_canary.slots.skipped": sum(progress.skipped.values()),
            "kv_canary.violations": progress.violations,
        }
    if part.status in _ERRORS:
        fields["error.type"] = part.status.value
    parent = sweep_context(record.id, record)
    span = spans.start("kv_canary.sweep.rank", started_ns, rank=identity, parent=parent, attributes=fields)
    for share in progress.shares if progress else ():
        child = spans.start(
            "kv_canary.sweep.group",
            started_ns + round(share.began * 1e9),
            rank=identity,
            parent=span.get_span_context(),
            attributes={
                "kv_canary.group": share.group,
                "kv_canary.slots.total": share.total,
                "kv_canary.slots.checked": share.checked,
                "kv_canary.violations": share.violations,
            },
        )
        child.end(end_time=started_ns + round(share.ended * 1e9))
    _set_status(span, part.status, part.error)
    span.end(end_time=ended_ns)
    return ended_ns


def _set_status(span: Span, status: SweepStatus, error: str | None) -> None:
    if status in _ERRORS:
        span.set_status(Status(StatusCode.ERROR, error or status.value))
