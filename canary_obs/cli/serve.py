"""`canary-obs serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from canary_obs.config import ServiceConfig, load


def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to bind; wider than loopback needs a token.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind; 0 = any.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Where engines report: ipc://PATH or tcp://HOST:PORT.")
    ] = None,
    wait: Annotated[
        float,
        typer.Option(min=0.0, max=86400.0, help="Seconds to wait for another service to end."),
    ] = 0.0,
) -> None:
    """Run the service: /metrics, console, sweeps on demand."""
    from canary_obs.serve import serve as run

    given = {"host": host, "port": port, "endpoint": endpoint}
    overrides = {name: value for name, value in given.items() if value is not None}
    run(load(ServiceConfig, overrides=overrides), wait_seconds=wait)
