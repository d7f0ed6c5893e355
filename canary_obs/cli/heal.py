"""`canary-obs heal`: what is done about damage."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from canary_obs.cli.output import print_table
from canary_obs.cli.ranks import reached
from canary_obs.cli.service_client import client_of
from canary_obs.cli.service_options import AsJson, OfEngine, OfInstance, Ranks, TokenFile, Url, selection
from canary_obs.cli.words import plain, print_json
from canary_obs.vocabulary import HealPolicy


def heal(
    policy: Annotated[
        HealPolicy | None, typer.Option(help="Follow this policy from now on; off ends healing at once.")
    ] = None,
    release: Annotated[
        list[int] | None, typer.Option(help="Bring this block back from quarantine; repeatable.", min=0)
    ] = None,
    release_all: Annotated[
        bool, typer.Option("--release-all", help="Bring all blocks back from quarantine.")
    ] = False,
    ranks: Ranks = None,
    engine: OfEngine = None,
    instance: OfInstance = None,
    url: Url = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Show what is done about damage on each rank; with options, change it."""
    client = client_of(url, token_file)
    wanted: dict[str, Any] = {} if policy is None else {"policy": policy.value}
    if release or release_all:
        wanted |= {"release": release or [], "release_all": release_all}
    if not wanted:
        _show(client.get("/canary/heal"), as_json=json)
        return
    answer = client.post("/canary/heal", selection(ranks, engine, instance) | wanted)
    reached("sent to", answer, as_json=json)


def _show(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    table = Table("rank", "policy", "followed", "why", "quarantined", "of blocks", "actions")
    for rank in report["ranks"]:
        status = rank["status"]
        actions = [
            f"{action} {outcome} {count}"
            for action, outcomes in rank["actions"].items()
            for outcome, count in outcomes.items()
            if count
        ]
        blocks = ", ".join(f"{group} {block}" for group, block in status["quarantined"])
        table.add_row(
            plain(rank["rank"]), plain(status["policy"]), plain(status["effective"]), plain(status["why"]),
            plain(blocks or None), plain(status["pool_blocks"] or None), plain(", ".join(actions) or None),
        )  # fmt: skip
    print_table(table)
