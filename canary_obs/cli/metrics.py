"""`canary-obs metrics`."""

from __future__ import annotations

from typing import Annotated

import typer

from canary_obs.cli.output import write_out
from canary_obs.errors import ConfigurationError


def metrics(
    form: Annotated[str, typer.Option("--format", help="md or json.")] = "md",
) -> None:
    """Print every metric: name, kind, unit, labels, meaning."""
    from canary_obs.telemetry.metric_docs import Format, render

    if form not in list(Format):
        raise ConfigurationError("--format", form, "no such format", "Use md or json.")
    write_out(render(Format(form)) + "\n")
