"""`canary-obs violations`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from canary_obs.cli.output import id_column, note, print_table
from canary_obs.cli.service_client import client_of
from canary_obs.cli.service_options import AsJson, OfEngine, OfInstance, TokenFile, Url
from canary_obs.cli.words import moment, plain, print_json, rank_of


def violations(
    reason: Annotated[str | None, typer.Option(help="Only this reason, like kv_data.")] = None,
    phase: Annotated[str | None, typer.Option(help="Only found in this phase, like sweep.")] = None,
    group: Annotated[str | None, typer.Option(help="Only in this group.")] = None,
    engine: OfEngine = None,
    instance: OfInstance = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only of this rank.")] = None,
    before: Annotated[int | None, typer.Option(min=0, help="Only with lower numbers: the next page.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Lines at most.")] = 50,
    url: Url = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List violations, newest first."""
    page = client_of(url, token_file).get(
        "/canary/violations", reason=reason, phase=phase, group=group, engine=engine, instance=instance,
        rank=rank, before=before, limit=limit,
    )  # fmt: skip
    if json:
        print_json(page)
        return
    table = Table(
        "number",
        "time",
        "rank",
        "reason",
        "phase",
        "group",
        "slot",
        "position",
        "step",
        "request",
        id_column("incident"),
    )
    for event in page["violations"]:
        row, who = event["violation"], event["identity"]
        table.add_row(
            plain(event["number"]), moment(row["time_ns"]),
            plain(rank_of([who["engine"], who["instance"], who["rank"]])), plain(row["reason"]),
            plain(row["phase"]), plain(row["group"]), plain(row["slot"]), plain(row["position"]),
            plain(row["step"]), plain(row["request"]), plain(event["incident"]),
        )  # fmt: skip
    print_table(table)
    if page["next"] is not None:
        note(f"{page['matching']} match; the next page: --before {page['next']}")
