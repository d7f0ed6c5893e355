"""`canary-obs status` and `canary-obs watch`."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from collections import Counter
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from canary_obs.cli.exit_codes import code_of_state, end_with
from canary_obs.cli.output import print_table, write_out
from canary_obs.cli.service_client import ServiceClient, client_of
from canary_obs.cli.service_options import AsJson, TokenFile, Url
from canary_obs.cli.words import coloured, duration, moment, plain, print_json, rank_of, share
from canary_obs.plurals import counted

_REASONS_SHOWN = 20
_WORST_FIRST = ("violated", "blind", "degraded", "off", "ok")


def status(url: Url = None, token_file: TokenFile = None, json: AsJson = False) -> None:
    """Print the verdict, its reasons and every rank, worst first. Exits with 0, 3, 4 or 5 by the state."""
    answer = client_of(url, token_file).get("/canary/status")
    if json:
        print_json(answer)
    else:
        print_table(status_text(answer))
    end_with(code_of_state(answer["state"]))


def watch(
    url: Url = None,
    token_file: TokenFile = None,
    json: AsJson = False,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")] = 2.0,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="End after this long; default: never.")
    ] = None,
) -> None:
    """Follow the service: the ranks on a terminal, otherwise a line per event. Exits by the last state."""
    client = client_of(url, token_file)
    until = None if seconds is None else time.monotonic() + seconds
    if json or not sys.stdout.isatty():
        _follow_events(client, seconds, as_json=json)
    else:
        _follow_screen(client, until, interval)
    end_with(code_of_state(client.get("/canary/status")["state"]))


def status_text(answer: dict[str, Any]) -> RenderableType:
    """The verdict on one line, the reasons, and a table of ranks."""
    ranks = answer["ranks"]
    counts = Counter(rank["state"] for rank in ranks)
    listed = ", ".join(f"{counts[state]} {state}" for state in _WORST_FIRST if counts[state]) or "no rank"
    headline = coloured(answer["state"])
    headline.append(f"  {listed}; service {answer['version']}", style="default")
    parts: list[RenderableType] = [headline]
    parts += [plain(f"  {reason}") for reason in answer["reasons"][:_REASONS_SHOWN]]
    if (more := len(answer["reasons"]) - _REASONS_SHOWN) > 0:
        parts.append(plain(f"  and {counted(more, 'more reason')}"))
    if ranks:
        parts.append(_rank_table(ranks))
    return Group(*parts)


def _rank_table(ranks: list[dict[str, Any]]) -> Table:
    table = Table(
        "rank", "state", "mode", "step", "coverage", "violations", "last sweep", "oldest check", "seen"
    )
    for rank in sorted(ranks, key=lambda rank: _WORST_FIRST.index(rank["state"])):
        identity, snapshot, totals = rank["identity"], rank["snapshot"], rank["totals"] or {}
        name = plain(rank_of([identity["engine"], identity["instance"], identity["rank"]]))
        if snapshot is None:
            table.add_row(name, coloured(rank["state"]), "", "", "", "", "", "", "no snapshot yet")
            continue
        found = sum(
            count
            for group in totals.get("groups", {}).values()
            for reasons in group["violations"].values()
            for count in reasons.values()
        )
        mode = snapshot["mode"] + (" paused" if snapshot["paused"] else "")
        patrol = snapshot["patrol"]
        table.add_row(
            name, coloured(rank["state"]), plain(mode), plain(snapshot["step"]), _coverage(rank["hello"]),
            plain(found), _sweep_of(snapshot), duration(patrol["oldest_check_seconds"] if patrol else None),
            f"{duration(rank['snapshot_age'])} ago",
        )  # fmt: skip
    return table


def _coverage(hello: dict[str, Any] | None) -> str:
    if hello is None:
        return "-"
    groups = hello["groups"]
    covered = sum(group["slots"] * group["protected_slot_bytes"] for group in groups)
    every = sum(group["slots"] * group["slot_bytes"] for group in groups)
    return share(covered, hello["allocated_bytes"] or every)


def _sweep_of(snapshot: dict[str, Any]) -> str:
    sweep = snapshot["sweep"]
    if sweep is None:
        return "none yet"
    if sweep["status"] == "running":
        return f"running, {share(sweep['checked'], sweep['total'])}"
    return f"{sweep['status']}, {counted(sweep['checked'], 'slot')}"


def _follow_screen(client: ServiceClient, until: float | None, interval: float) -> None:
    with Live(console=Console(), auto_refresh=False, screen=False) as live:
        while True:
            answer = client.get("/canary/status")
            live.update(
                Group(plain(f"{client.url}  {moment(time.time_ns())}"), status_text(answer)), refresh=True
            )
            wait = interval if until is None else min(interval, until - time.monotonic())
            if wait <= 0:
                return
            time.sleep(wait)


def _follow_events(client: ServiceClient, seconds: float | None, *, as_json: bool) -> None:
    for kind, data in client.events(seconds):
        line = jsonlib.dumps({"event": kind, "data": data}) if as_json else event_text(kind, data)
        write_out(line + "\n")


def event_text(kind: str, data: dict[str, Any]) -> str:
    """One event on one line."""
    now = moment(time.time_ns())
    match kind:
        case "state":
            identity = data["identity"]
            who = (
                "all"
                if identity is None
                else rank_of([identity[part] for part in ("engine", "instance", "rank")])
            )
            before = f" (was {data['before']})" if data["before"] else ""
            why = f": {'; '.join(data['reasons'][:3])}" if data["reasons"] else ""
            return f"{now}  {who} is {data['state']}{before}{why}"
        case "violation":
            row, identity = data["violation"], data["identity"]
            return (
                f"{now}  violation {data['number']}: {row['reason']} at {row['phase']}, "
                f"rank {identity['rank']} of {identity['engine']}/{identity['instance']}, "
                f"group {row['group']}, slot {row['slot']}, "
                f"position {row['position']}, request {row['request']}, incident {data['incident']}"
            )
        case "incident_opened" | "incident_closed":
            state = kind.removeprefix("incident_")
            return f"{now}  incident {data['id']} {state}: canary-obs incident show {data['id']}"
        case "heal":
            heal = data["heal"]
            of = f"group {heal['group']}, block {heal['block']}, request {heal['request']}"
            why = f": {heal['detail']}" if heal["detail"] else ""
            return (
                f"{now}  healing: {heal['action']} {heal['outcome']}, {of}, incident {data['incident']}{why}"
            )
        case "tainted":
            names = ", ".join(one["request"] for one in data["requests"][:5]) or "nobody"
            where = f"slot {data['slot']} of {data['group']}, incident {data['incident']}"
            return f"{now}  tainted: {names} read {where}"
        case "sweep_begun" | "sweep_ended":
            return f"{now}  sweep {data['id']} ({data['trigger']}): {data['status']}"
        case "sweep_progress":
            done = share(data["checked"], data["total"])
            return f"{now}  sweep {data['id']}: {done}, {duration(data['eta_seconds'])} left"
        case "dropped":
            return f"{now}  events were lost: {data['count'] or 'how many is not known'}"
        case _:
            return f"{now}  {kind}"
