"""An evidence bundle as text and tables."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from canary_obs.heals import Heal
from canary_obs.hub.incidents import Incident
from canary_obs.hub.taint_store import Taint
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.plurals import counted
from canary_obs.records import Evidence, Hello
from canary_obs.slot_facts import ChangedWord, SlotFacts
from canary_obs.telemetry.incident_bundle import IncidentBundle
from canary_obs.vocabulary import Completeness, Plane


def incident_text(bundle: IncidentBundle) -> Group:
    """The incident, its violations, the evidence of each rank, and the versions and settings of the ranks."""
    incident = bundle.incident
    parts: list[RenderableType] = [_headline(incident), _violations((*incident.first, *incident.latest))]
    parts += [_evidence(evidence) for evidence in incident.evidence]
    if not incident.evidence:
        parts.append("No rank has sent evidence.")
    parts += [_tainted(taint) for taint in bundle.tainted]
    parts += [_heals(incident.heals)] if incident.heals else []
    parts += [_rank(hello) for hello in bundle.ranks]
    return Group(*parts)


def _headline(incident: Incident) -> str:
    ended = "still open" if incident.closed_ns is None else f"closed {_time(incident.closed_ns)}"
    seen = "acknowledged" if incident.acknowledged else "not acknowledged"
    reasons = ", ".join(f"{reason.value} {count}" for reason, count in incident.reasons.items())
    ranks = ", ".join(map(str, incident.ranks))
    return escape(
        f"Incident {incident.id}: {counted(incident.violations, 'violation')} ({reasons})\n"
        f"  engine {incident.engine}, instance {incident.instance}, ranks {ranks}, "
        f"groups {', '.join(incident.groups)}\n"
        f"  opened {_time(incident.opened_ns)}, last violation {_time(incident.last_ns)}, {ended}, {seen}\n"
        f"  trace {incident.trace_id}, sweeps {', '.join(incident.sweeps) or 'none'}\n"
    )


def _violations(events: Iterable[ViolationEvent]) -> Table:
    table = Table("number", "rank", "step", "phase", "reason", "group", "part", "slot", "position",
                  "expected", "actual", "request", title="Violations (first and latest)")  # fmt: skip
    for event in events:
        row = event.violation
        part = row.part.value if row.part else None
        shown = (event.number, event.identity.rank, row.step, row.phase.value, row.reason.value, row.group,
                 part, row.slot, row.position, row.expected, row.actual, row.request)  # fmt: skip
        table.add_row(*(escape(_text(value)) for value in shown))
    return table


def _evidence(evidence: Evidence) -> str:
    slot = evidence.slot
    when = "read on command, it may have changed since" if evidence.prompted else "read at the violation"
    lines = [
        f"\nSlot {slot.slot} of group {evidence.group}, rank {evidence.identity.rank} on "
        f"{evidence.identity.device}: step {evidence.step}, {when}",
        f"  record: {slot.state or 'damaged'}, position {slot.position}, {_verdict(slot)}",
    ]
    for part, recorded in slot.recorded.items():
        lines.append(f"  {part.value}: recorded {recorded}, found {slot.found.get(part, 'not covered')}")
    lines += [f"  {_change(change)}" for change in evidence.changed]
    if slot.intact is False and not evidence.changed:
        lines.append("  no single 32-bit word explains the difference: more than one word changed")
    damaged = [str(slot.slot) for slot in evidence.neighbours if slot.intact is False]
    lines.append(f"  neighbours: {len(evidence.neighbours)} read, damaged: {', '.join(damaged) or 'none'}")
    history = [
        f"{event.kind.value} at step {event.step}"
        + (f" (requests {', '.join(event.requests)})" if event.requests else "")
        for event in evidence.history
    ]
    unknown = "" if evidence.writes_known else " (writes are not recorded by this engine)"
    lines.append(f"  history: {'; '.join(history) or 'unknown'}{unknown}")
    lines.append(f"  held by: {', '.join(evidence.holders) or 'no running request'}")
    return escape("\n".join(lines))


def _tainted(taint: Taint) -> str:
    """Who read a damage."""
    lines = [
        f"\nWho read slot {taint.slot} of group {taint.group} ({taint.reason.value}, found at step "
        f"{taint.step}; last good check: {taint.good_check.value}, step {taint.good_step})"
    ]
    for one in taint.requests:
        how = "computed from it" if one.derived else "the slot itself"
        state = "running" if one.running else "ended"
        outputs = "an unknown number of" if one.outputs is None else one.outputs
        lines.append(
            f"  {one.request} ({state}): {how}, from step {one.step}; {outputs} tokens from number "
            f"{one.first_output} on"
        )
    if taint.completeness is Completeness.UNKNOWN:
        lines.append(f"  there may be more: {taint.cause}")
    elif not taint.requests:
        lines.append("  no request")
    return escape("\n".join(lines))


def _heals(heals: Iterable[Heal]) -> Table:
    table = Table("time", "action", "outcome", "policy", "group", "block", "request", "blocks", "tokens",
                  "reason", "detail", title="What was done about it")  # fmt: skip
    for heal in heals:
        reason = heal.reason.value if heal.reason else None
        what = heal.action.value, heal.outcome.value, heal.policy.value
        shown = (_time(heal.time_ns), *what, heal.group, heal.block, heal.request, heal.blocks or None,
                 heal.tokens or None, reason, heal.detail)  # fmt: skip
        table.add_row(*(escape(_text(value)) for value in shown))
    return table


def _verdict(slot: SlotFacts) -> str:
    return {
        True: "bytes match it now",
        False: "bytes do not match it",
        None: "bytes were not compared",
    }[slot.intact]


def _change(change: ChangedWord) -> str:
    part = change.part.value + (" scales" if change.plane is Plane.SCALES else "")
    where = (
        f"one word changed: {part}, layer {change.layer}, head {change.head}, "
        f"element {change.element} ({change.dtype})"
    )
    if change.original is None or change.current is None:
        return f"{where}; its values are gone, the slot was written again"
    bits = (int(change.original, 16) ^ int(change.current, 16)).bit_count()
    return f"{where}: was {change.original}, is {change.current}, {counted(bits, 'bit')} changed"


def _rank(hello: Hello) -> Table:
    who = hello.identity
    table = Table("property", "value", title=f"Rank {who.rank}, process {who.pid} on {who.device}")
    table.add_row("engine", escape(f"{who.engine} {hello.engine_version}, backend {hello.backend}"))
    for name, value in (hello.versions | hello.settings).items():
        table.add_row(escape(name), escape(value))
    return table


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _time(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(sep=" ", timespec="milliseconds")
