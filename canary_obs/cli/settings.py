"""`canary-obs settings`."""

from __future__ import annotations

from rich.table import Table

from canary_obs.cli.output import print_rich
from canary_obs.config import PREFIX, CanaryConfig, ClientConfig, ServiceConfig, load, masked


def settings() -> None:
    """Print every setting and its value (secrets masked)."""
    for loaded in (load(CanaryConfig), load(ServiceConfig), load(ClientConfig)):
        table = Table("variable", "value", title=type(loaded).__name__)
        for name, value in masked(loaded).items():
            table.add_row(f"{PREFIX}{name.upper()}", value)
        print_rich(table)
