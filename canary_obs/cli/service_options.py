"""Options of the commands that ask a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from canary_obs.config_values import parse_ranks

Url = Annotated[
    str | None, typer.Option(help="Of the service. [env: KV_CANARY_URL; default: http://127.0.0.1:9464]")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File that holds the token. [env: KV_CANARY_TOKEN_FILE, or the token in KV_CANARY_TOKEN]"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the service's JSON.")]
Ranks = Annotated[str | None, typer.Option(help="Numbers of ranks, like 0-7,12; default: all.")]
OfEngine = Annotated[str | None, typer.Option("--engine", help="Only ranks of this engine.")]
OfInstance = Annotated[str | None, typer.Option("--instance", help="Only ranks of this engine instance.")]
Limit = Annotated[int, typer.Option(min=1, max=256, help="Lines at most.")]
By = Annotated[str | None, typer.Option(help="Who has seen it; default: the token's name.")]
Comment = Annotated[str | None, typer.Option("--comment", "-m", help="What is known about it.")]


def selection(ranks: str | None, engine: str | None, instance: str | None) -> dict[str, Any]:
    """The members of a request's body that name ranks. Raises ConfigurationError."""
    numbers = list(parse_ranks(ranks, "--ranks")) if ranks is not None else []
    return {"ranks": numbers, "engine": engine, "instance": instance}
