"""`canary-obs sweep` and `canary-obs sweeps`."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from canary_obs.cli.exit_codes import ExitCode, code_of_sweep, end_with
from canary_obs.cli.output import id_column, note, print_table
from canary_obs.cli.service_client import ServiceClient, client_of
from canary_obs.cli.service_options import (
    AsJson,
    Limit,
    OfEngine,
    OfInstance,
    Ranks,
    TokenFile,
    Url,
    selection,
)
from canary_obs.cli.sweep_bars import SweepBars
from canary_obs.cli.words import coloured, duration, moment, plain, print_json, rank_of, rate, share
from canary_obs.errors import ConfigurationError
from canary_obs.plurals import counted

POLL_SECONDS = 0.5

sweeps = typer.Typer(invoke_without_command=True, help="List sweeps; show, pause, resume or cancel one.")

SweepId = Annotated[str, typer.Argument(help="Id of the sweep.")]


def sweep(
    wait: Annotated[bool, typer.Option("--wait", help="Show its progress, and exit by its result.")] = False,
    ranks: Ranks = None,
    engine: OfEngine = None,
    instance: OfInstance = None,
    groups: Annotated[str | None, typer.Option(help="Groups, like full,swa; default: all.")] = None,
    links_only: Annotated[bool, typer.Option("--links-only", help="Compare no bytes.")] = False,
    used: Annotated[bool, typer.Option("--used", help="Only slots that running requests use.")] = False,
    unused: Annotated[
        bool, typer.Option("--unused", help="Only slots that no running request uses.")
    ] = False,
    request: Annotated[str | None, typer.Option(help="Only slots of this running request.")] = None,
    slots: Annotated[str | None, typer.Option(help="Only these slots, like 4096-8191.")] = None,
    budget_ms: Annotated[float | None, typer.Option(min=0.001, max=1000, help="Per engine step.")] = None,
    deadline: Annotated[float | None, typer.Option(min=0.001, max=604_800, help="Seconds.")] = None,
    window: Annotated[str | None, typer.Option(help="Hours of the day in UTC, like 22:00-05:30.")] = None,
    url: Url = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Compare what the prefix caches hold, now. With --wait 0 = passed, 3 = violated, 4 = not checked."""
    first, last = _slots_of(slots)
    body = selection(ranks, engine, instance) | {
        "groups": [name for name in (groups or "").split(",") if name], "data": False if links_only else None,
        "used_only": used or None, "unlocked_only": unused or None, "request": request, "first_slot": first,
        "last_slot": last, "budget_ms": budget_ms, "deadline_seconds": deadline, "window": window,
    }  # fmt: skip
    client = client_of(url, token_file)
    record = client.post("/canary/sweep", body)
    if wait:
        record = _follow(client, record, quiet=json)
    if json:
        print_json(record)
    else:
        print_table(sweep_text(record))
    end_with(code_of_sweep(record["status"]) if wait else ExitCode.OK)


@sweeps.callback()
def list_sweeps(
    context: typer.Context,
    limit: Limit = 20,
    url: Url = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List sweeps, newest first."""
    if context.invoked_subcommand is not None:
        return
    answer = client_of(url, token_file).get("/canary/sweeps", limit=limit)
    if json:
        print_json(answer)
        return
    table = Table(
        id_column("sweep"),
        "started by",
        "status",
        "requested",
        "ranks",
        "checked",
        "rate",
        "left",
        "violations",
    )
    for record in answer["sweeps"]:
        word = "paused" if record["paused"] and record["ended_ns"] is None else record["status"]
        table.add_row(
            plain(record["id"]), plain(record["trigger"]), coloured(word), moment(record["requested_ns"]),
            plain(len(record["ranks"])), share(record["checked"], record["total"]),
            rate(record["slots_per_second"]), duration(record["eta_seconds"]), plain(record["violations"]),
        )  # fmt: skip
    print_table(table)


@sweeps.command("show")
def show(sweep_id: SweepId, url: Url = None, token_file: TokenFile = None, json: AsJson = False) -> None:
    """Print one sweep, rank by rank."""
    _print(client_of(url, token_file).get(f"/canary/sweeps/{sweep_id}"), as_json=json)


@sweeps.command("cancel")
def cancel(sweep_id: SweepId, url: Url = None, token_file: TokenFile = None, json: AsJson = False) -> None:
    """End a sweep; what was checked until then is kept."""
    _print(client_of(url, token_file).delete(f"/canary/sweeps/{sweep_id}"), as_json=json)


@sweeps.command("pause")
def pause(sweep_id: SweepId, url: Url = None, token_file: TokenFile = None, json: AsJson = False) -> None:
    """Hold one sweep; patrol and all other checks go on."""
    _print(client_of(url, token_file).post(f"/canary/sweeps/{sweep_id}/pause"), as_json=json)


@sweeps.command("resume")
def resume(sweep_id: SweepId, url: Url = None, token_file: TokenFile = None, json: AsJson = False) -> None:
    """Let a paused sweep go on."""
    _print(client_of(url, token_file).post(f"/canary/sweeps/{sweep_id}/resume"), as_json=json)


def sweep_text(record: dict[str, Any]) -> RenderableType:
    """A sweep on one line, what ended it, and a table of its ranks."""
    headline = plain(f"sweep {record['id']}: ").append_text(coloured(record["status"]))
    if record["begins_ns"] is not None:
        headline.append(f", begins {moment(record['begins_ns'])}", style="default")
    if record["paused"] and record["ended_ns"] is None:
        headline.append(", paused", style="yellow")
    parts: list[RenderableType] = [headline]
    if record["error"]:
        parts.append(plain(f"  {record['error']}"))
    if record["ranks"]:
        table = Table("rank", "status", "checked", "of", "skipped", "violations", "rate", "left", "why")
        for part in record["ranks"]:
            seen = part["progress"] or {}
            table.add_row(
                plain(rank_of(part["key"])), coloured(part["status"]), plain(seen.get("checked")),
                plain(seen.get("total")), plain(sum(seen.get("skipped", {}).values()) if seen else None),
                plain(seen.get("violations")), rate(part["slots_per_second"]), duration(part["eta_seconds"]),
                plain(part["error"]),
            )  # fmt: skip
        parts.append(table)
    return Group(*parts)


def _follow(client: ServiceClient, record: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """The record at its end; progress goes to standard error."""
    note(f"sweep {record['id']} on {counted(len(record['ranks']), 'rank')}; Ctrl-C leaves it running")
    with SweepBars(enabled=not quiet and sys.stderr is not None and sys.stderr.isatty()) as bars:
        while record["ended_ns"] is None:
            bars.show(record)
            time.sleep(POLL_SECONDS)
            record = client.get(f"/canary/sweeps/{record['id']}")
        bars.show(record)
    return record


def _print(record: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        print_table(sweep_text(record))


def _slots_of(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    first, dash, last = text.partition("-")
    try:
        bounds = int(first), int(last if dash else first)
    except ValueError:
        bounds = 1, 0
    if not 0 <= bounds[0] <= bounds[1]:
        raise ConfigurationError("--slots", text, "not a slot or a range of slots", "Use 4096 or 4096-8191.")
    return bounds
