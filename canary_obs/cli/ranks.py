"""`canary-obs pause`, `canary-obs resume` and `canary-obs drill`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from canary_obs.cli.exit_codes import ExitCode, end_with
from canary_obs.cli.output import print_table, write_out
from canary_obs.cli.service_client import client_of
from canary_obs.cli.service_options import AsJson, OfEngine, OfInstance, Ranks, TokenFile, Url, selection
from canary_obs.cli.words import coloured, duration, plain, print_json, rank_of
from canary_obs.plurals import counted

DRILL_SECONDS = 40.0  # the service answers within 30


def pause(
    ranks: Ranks = None,
    engine: OfEngine = None,
    instance: OfInstance = None,
    url: Url = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Stop sweeps and patrol; the checks around each forward go on. The ranks are degraded meanwhile."""
    body = selection(ranks, engine, instance)
    reached("paused", client_of(url, token_file).post("/canary/pause", body), as_json=json)


def resume(
    ranks: Ranks = None,
    engine: OfEngine = None,
    instance: OfInstance = None,
    url: Url = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Continue sweeps and patrol."""
    body = selection(ranks, engine, instance)
    reached("resumed", client_of(url, token_file).post("/canary/resume", body), as_json=json)


def drill(
    ranks: Ranks = None,
    engine: OfEngine = None,
    instance: OfInstance = None,
    url: Url = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Inject a harmless fault and follow it. Exits with 0 when every rank detected it, otherwise 4."""
    client = client_of(url, token_file)
    record = client.post("/canary/drill", selection(ranks, engine, instance), seconds=DRILL_SECONDS)
    if json:
        print_json(record)
    else:
        table = Table("rank", "outcome", "by", "after", "steps", "why")
        for part in record["ranks"]:
            found = part["finding"]
            latency = None if found["latency_ms"] is None else found["latency_ms"] / 1e3
            table.add_row(
                plain(rank_of(part["key"])), coloured(found["outcome"]), plain(found["phase"]),
                duration(latency), plain(found["latency_steps"]), plain(found["error"]),
            )  # fmt: skip
        print_table(table)
    detected = all(part["finding"]["outcome"] == "detected" for part in record["ranks"])
    end_with(ExitCode.OK if record["ranks"] and detected else ExitCode.BLIND)


def reached(verb: str, answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    write_out(f"{verb}: {counted(answer['ranks'], 'rank')} ({', '.join(answer['reached'])})\n")
