"""/: the status page, a single HTML document that the browser refreshes; no scripts, no assets."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from string import Template

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from canary_obs import __version__
from canary_obs.hub.ranks import RankView, rank_name
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.service.context import context_of
from canary_obs.service.route_policy import TokenScope, requires

router = APIRouter(tags=["page"])

VIOLATIONS_SHOWN = 20
_PAGE = Template(files("canary_obs.service").joinpath("web/status.html").read_text("utf-8"))
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"


@router.get("/", openapi_extra=requires(TokenScope.READ), response_class=HTMLResponse)
def page(request: Request) -> HTMLResponse:
    """The state, all ranks and the latest violations."""
    hub = context_of(request).hub
    state, reasons = hub.verdict()
    content = _PAGE.substitute(
        version=escape(__version__),
        state=state.value,
        reasons="".join(f"<li>{escape(reason)}</li>" for reason in reasons),
        ranks="\n".join(_rank_row(rank) for rank in hub.ranks()),
        violations="\n".join(_violation_row(event) for event in hub.violations()[:VIOLATIONS_SHOWN]),
    )
    return HTMLResponse(content, headers={"Content-Security-Policy": _POLICY})


def _rank_row(rank: RankView) -> str:
    totals = rank.totals
    state = f'<span class="state {rank.state.value}">{rank.state.value}</span>'
    name = escape(rank_name(rank.identity.key))
    if totals is None:
        return f"<tr><td>{name}</td><td>{state}</td><td colspan=7>no snapshot yet</td></tr>"
    groups = totals.groups.values()
    numbers = (
        totals.step,
        sum(sum(group.verified.values()) for group in groups),
        sum(sum(reasons.values()) for group in groups for reasons in group.violations.values()),
        sum(totals.sweep_passes.values()),
    )
    sweep = totals.sweep
    return (
        f"<tr><td>{name}</td><td>{state}</td>"
        f"{_cells([totals.mode.value])}{_cells(numbers, number=True)}"
        f"{_cells([f'{sweep.status.value}, {sweep.checked} of {sweep.total}' if sweep else 'none yet'])}"
        f"{_cells(['never' if rank.snapshot_age is None else f'{rank.snapshot_age:.1f} s'])}</tr>"
    )


def _violation_row(event: ViolationEvent) -> str:
    row = event.violation
    time = datetime.fromtimestamp(row.time_ns / 1e9, UTC).isoformat(timespec="milliseconds")
    what = (event.number, time, rank_name(event.identity.key), row.reason.value, row.phase.value, row.group)
    where = (row.slot, row.position, row.step, row.request)
    return f"<tr>{_cells((*what, *where))}</tr>"


def _cells(values: Iterable[object], *, number: bool = False) -> str:
    attributes = ' class="number"' if number else ""
    return "".join(f"<td{attributes}>{escape('' if value is None else str(value))}</td>" for value in values)
