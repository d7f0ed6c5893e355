"""A finished sweep as spans: one for all of it, one per rank, one per group of a rank."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.trace import Span, Status, StatusCode

from canary_obs.hub.sweeps import RankSweep, SweepRecord
from canary_obs.records import Identity
from canary_obs.telemetry.spans import SpanMaker, place_of
from canary_obs.vocabulary import SweepStatus

_UNFINISHED = frozenset({SweepStatus.FAILED, SweepStatus.VIOLATED})

# The rank with this (engine, instance, rank); None = forgotten meanwhile.
IdentityOf = Callable[[tuple[str, str, int]], Identity | None]


def tell_sweep(spans: SpanMaker, record: SweepRecord, identity_of: IdentityOf) -> None:
    """All spans of a sweep that has ended."""
    place = place_of("sweep", record.id)
    fields = {
        "kv_canary.sweep.id": record.id,
        "kv_canary.sweep.trigger": record.trigger.value,
        "kv_canary.sweep.status": record.status.value,
        "kv_canary.sweep.data": record.data,
    }
    root = spans.start("kv_canary.sweep", record.requested_ns, place=place, attributes=fields)
    last = record.ended_ns or record.requested_ns
    for part in record.ranks:
        last = max(last, _tell_rank(spans, record, part, identity_of(part.key)))
    _mark(root, record.status, None)
    root.end(end_time=last)


def _tell_rank(spans: SpanMaker, record: SweepRecord, part: RankSweep, identity: Identity | None) -> int:
    """Returns when the rank was done, in ns."""
    ended_ns, done = record.ended_ns or record.requested_ns, part.progress
    started_ns = done.started_ns if done else record.requested_ns
    fields: dict[str, str | int] = {
        "kv_canary.sweep.id": record.id,
        "kv_canary.sweep.status": part.status.value,
    }
    if done is not None:
        ended_ns = done.started_ns + round(done.seconds * 1e9)
        fields |= {
            "kv_canary.step": done.step,
            "kv_canary.slots.total": done.total,
            "kv_canary.slots.checked": done.checked,
            "kv_canary.slots.skipped": sum(done.skipped.values()),
            "kv_canary.violations": done.violations,
        }
    parent = place_of("sweep", record.id)
    span = spans.start("kv_canary.sweep.rank", started_ns, rank=identity, parent=parent, attributes=fields)
    for share in done.shares if done else ():
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
    _mark(span, part.status, part.error)
    span.end(end_time=ended_ns)
    return ended_ns


def _mark(span: Span, status: SweepStatus, error: str | None) -> None:
    if status in _UNFINISHED:
        span.set_status(Status(StatusCode.ERROR, error or status.value))
