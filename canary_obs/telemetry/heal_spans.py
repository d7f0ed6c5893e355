"""Spans of actions of healing."""

from __future__ import annotations

from opentelemetry.trace import Status, StatusCode

from canary_obs.hub.heal_store import HealEvent
from canary_obs.telemetry.spans import SpanMaker, span_context_of
from canary_obs.vocabulary import HealOutcome


def export_heal(spans: SpanMaker, event: HealEvent) -> None:
    """Export one action, in the trace of its incident if it has one."""
    heal, failed = event.heal, event.heal.outcome is HealOutcome.FAILED
    span = spans.start(
        "kv_canary.heal",
        heal.time_ns,
        rank=event.identity,
        parent=None if event.incident is None else span_context_of("incident", event.incident),
        attributes={
            "kv_canary.incident.id": event.incident,
            "kv_canary.heal.action": heal.action.value,
            "kv_canary.heal.outcome": heal.outcome.value,
            "kv_canary.heal.policy": heal.policy.value,
            "kv_canary.heal.block": heal.block,
            "kv_canary.heal.blocks": heal.blocks or None,
            "kv_canary.heal.tokens": heal.tokens or None,
            "kv_canary.heal.forwards": heal.forwards,
            "kv_canary.heal.detail": heal.detail,
            "kv_canary.group": heal.group or None,
            "kv_canary.request": heal.request,
            "kv_canary.reason": heal.reason.value if heal.reason else None,
            "error.type": heal.outcome.value if failed else None,
        },
    )
    if failed:
        span.set_status(Status(StatusCode.ERROR, heal.detail or heal.outcome.value))
    span.end(end_time=heal.time_ns)
