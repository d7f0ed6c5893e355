"""Lines of the service's log as people read them: a violation or a write request on one line each."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any


def line_for_people(fields: Mapping[str, Any]) -> str:
    """The fields of a log line (`violation_fields`, `audit_fields`) as text, without control characters."""
    moment = datetime.fromisoformat(fields["timestamp"])
    what = _violation(fields) if fields["event"] == "kv_cache_violation" else _order(fields)
    return _visible(f"{moment:%Y-%m-%d %H:%M:%S}Z  {what}")


def _violation(fields: Mapping[str, Any]) -> str:
    where = f"slot {fields['slot']} of {fields['group']}"
    if fields["position"] is not None:
        where += f", position {fields['position']}"
    if fields["request"]:
        where += f", request {fields['request']}"
    return (
        f"VIOLATION {fields['number']}  {fields['reason']} in {where}, found by the {fields['phase']} check "
        f"on {fields['engine']}/{fields['instance']} rank {fields['rank']}: "
        f"canary-obs incident show {fields['incident']}"
    )


def _order(fields: Mapping[str, Any]) -> str:
    who = fields["token"] or "somebody without a token"
    status = "no answer" if fields["status"] is None else fields["status"]
    started = f", {fields['location']}" if fields["location"] else ""
    return (
        f"{fields['outcome']}  {fields['method']} {fields['path']} by {who} from {fields['client']}: "
        f"{status} in {1e3 * fields['seconds']:.0f} ms{started}"
    )


def _visible(text: str) -> str:
    # Paths and the names of requests are chosen by others, and terminals act on control characters.
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)
