"""`canary-obs tainted`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from canary_obs.cli.output import id_column, note, print_table
from canary_obs.cli.service_client import client_of
from canary_obs.cli.service_options import AsJson, Limit, OfEngine, OfInstance, TokenFile, Url
from canary_obs.cli.words import plain, print_json, rank_of


def tainted(
    since: Annotated[int, typer.Option(min=0, help="Only changes after this number: the next page.")] = 0,
    engine: OfEngine = None,
    instance: OfInstance = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only of this rank.")] = None,
    limit: Limit = 50,
    url: Url = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List the requests that read damage, by damage: which answers may be wrong, and from which token on."""
    page = client_of(url, token_file).get(
        "/canary/tainted", since=since, engine=engine, instance=instance, rank=rank, limit=limit
    )
    if json:
        print_json(page)
        return
    table = Table(
        "number", id_column("incident"), "rank", "damage", "request", "state", "read from step",
        "wrong from output", "outputs since",
    )  # fmt: skip
    for taint in page["tainted"]:
        for row in _rows(taint):
            table.add_row(*map(plain, row))
    print_table(table)
    if page["evicted"]:
        note("damages that changed after that number are not kept any more: there may be others")
    if page["matching"] > len(page["tainted"]):
        note(f"{page['matching']} damages match; the next page: --since {page['next']}")


def _rows(taint: dict[str, Any]) -> list[tuple[object, ...]]:
    """One per request; one without a request where there is none, or there may be more."""
    who = taint["identity"]
    damage = f"{taint['reason']} in slot {taint['slot']} of {taint['group']}"
    head = taint["number"], taint["incident"], rank_of([who["engine"], who["instance"], who["rank"]]), damage
    rows: list[tuple[object, ...]] = [
        (
            *head, one["request"], ("running" if one["running"] else "ended") + ", derived" * one["derived"],
            one["step"], one["first_output"], one["outputs"],
        )
        for one in taint["requests"]
    ]  # fmt: skip
    if taint["completeness"] != "known":
        rows.append((*head, f"unknown: {taint['cause']}", "", "", "", ""))
    elif not rows:
        rows.append((*head, "none", "", "", "", ""))
    return rows
