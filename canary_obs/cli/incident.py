"""`canary-obs incident`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

incident = typer.Typer(no_args_is_help=True, help="Read evidence bundles.")


@incident.command("show")
def show(
    file: Annotated[Path, typer.Argument(help="The saved answer of GET /canary/incidents/{id}.")],
) -> None:
    """Print an evidence bundle: what happened, where, what changed, and the versions and settings."""
    from canary_obs.cli.incident_text import incident_text
    from canary_obs.cli.output import print_rich
    from canary_obs.telemetry.incident_bundle import read_bundle

    print_rich(incident_text(read_bundle(file)))
