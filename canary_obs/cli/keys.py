"""`canary-obs keys`: CURVE keys for a service and engines on several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from canary_obs.cli.output import write_out
from canary_obs.config import PREFIX

_USES = {  # key kind: where its file belongs, and the setting that names it
    "service-secret": ("service", "SERVICE_SECRET_KEY_FILE"),
    "service-public": ("engines", "SERVICE_PUBLIC_KEY_FILE"),
    "engine-secret": ("engine", "ENGINE_SECRET_KEY_FILE"),
    "engine-public": ("service", "ENGINE_PUBLIC_KEYS_FILE"),
}


def keys(
    folder: Annotated[Path, typer.Argument(help="Where to put the four files; none is overwritten.")],
) -> None:
    """Make a key pair of the service and one of an engine, for tcp:// endpoints (docs/production.md)."""
    from canary_obs.transport.keys import make_keys

    for kind, path in make_keys(folder).items():
        where, setting = _USES[kind]
        write_out(f"{path}  to the {where}: {PREFIX}{setting}\n")
