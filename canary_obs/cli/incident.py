"""`canary-obs incident`, `canary-obs incidents` and `canary-obs ack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from canary_obs.cli.exit_codes import CommandFailed, ExitCode
from canary_obs.cli.output import id_column, note, print_rich, print_table, write_out
from canary_obs.cli.service_client import client_of
from canary_obs.cli.service_options import (
    AsJson,
    By,
    Comment,
    Limit,
    OfEngine,
    OfInstance,
    Ranks,
    TokenFile,
    Url,
    selection,
)
from canary_obs.cli.words import coloured, moment, plain, print_json
from canary_obs.errors import ConfigurationError

incident = typer.Typer(no_args_is_help=True, help="Read evidence bundles.")


@incident.command("show")
def show(
    file: Annotated[
        str,
        typer.Argument(
            metavar="ID|FILE", help="Id of an incident of the service, or a file saved with --json."
        ),
    ],
    url: Url = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Print an evidence bundle: what happened, where, what changed, and the versions and settings."""
    from canary_obs.cli.incident_text import incident_text
    from canary_obs.telemetry.incident_bundle import bundle_of, read_bundle

    path = Path(file)
    if path.exists() or "/" in file or path.suffix == ".json":
        bundle = read_bundle(path)
        content: Any = None
    else:
        content = client_of(url, token_file).get(f"/canary/incidents/{file}")
        bundle = bundle_of(content)
    if json:
        print_json(content) if content is not None else write_out(path.read_text("utf-8"))
    else:
        print_rich(incident_text(bundle))


def incidents(limit: Limit = 20, url: Url = None, token_file: TokenFile = None, json: AsJson = False) -> None:
    """List incidents, newest first: bursts of violations of one engine instance."""
    answer = client_of(url, token_file).get("/canary/incidents", limit=limit)
    if json:
        print_json(answer)
        return
    table = Table(
        id_column("incident"),
        "engine",
        "ranks",
        "opened",
        "last",
        "state",
        "violations",
        "reasons",
        "seen by",
    )
    for found in answer["incidents"]:
        seen = [made for made in found["acknowledgements"] if made["undone_ns"] is None]
        state = "closed" if found["closed_ns"] else "open"
        reasons = ", ".join(f"{reason} {count}" for reason, count in found["reasons"].items())
        who = ", ".join(made["by"] or "someone" for made in seen)
        table.add_row(
            plain(found["id"]), plain(f"{found['engine']}/{found['instance']}"),
            plain(", ".join(map(str, found["ranks"]))), moment(found["opened_ns"]), moment(found["last_ns"]),
            coloured("violated" if not found["acknowledged"] else "ok").append(f" {state}", style="default"),
            plain(found["violations"]), plain(reasons),
            plain(who or ("acknowledged" if found["acknowledged"] else "nobody")),
        )  # fmt: skip
    print_table(table)


def ack(
    incident: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Of the incident; default: all.")
    ] = None,
    ranks: Ranks = None,
    engine: OfEngine = None,
    instance: OfInstance = None,
    up_to: Annotated[int | None, typer.Option(min=0, help="No later violations than this number.")] = None,
    by: By = None,
    comment: Comment = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All incidents, faults and silent ranks.")
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take the incident's latest one back.")] = False,
    url: Url = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Mark one incident, some ranks or everything as seen: the state may become ok again."""
    chosen = selection(ranks, engine, instance)
    named = incident is not None or any(chosen.values()) or up_to is not None
    if named is everything:
        rule = "what was seen must be named" if not named else "it is everything, or what is named"
        raise ConfigurationError("ack", incident or "", rule, "Give an incident's ID, --ranks, or --all.")
    client = client_of(url, token_file)
    if undo:
        if incident is None:
            raise ConfigurationError("--undo", True, "an incident must be named", "Give its ID.")
        found = client.get(f"/canary/incidents/{incident}")["incident"]
        latest = [made["id"] for made in found["acknowledgements"] if made["undone_ns"] is None]
        if not latest:
            raise CommandFailed(ExitCode.FAILED, f"incident {incident} has no acknowledgement to take back")
        record = client.delete(f"/canary/acknowledgements/{latest[-1]}")
    else:
        body = chosen | {"incident": incident, "up_to": up_to, "by": by, "comment": comment}
        record = client.post("/canary/acknowledge", body)
    if json:
        print_json(record)
        return
    verb = "taken back" if undo else "acknowledged"
    for name, numbers in record["incidents"].items():
        write_out(f"{verb}: incident {name}, ranks {', '.join(map(str, numbers))}\n")
    if not record["incidents"]:
        note("no incident was open that this covers")
