"""`canary-obs export`: dashboards, alerts, Kubernetes and compose files, as this release ships them."""

from __future__ import annotations

from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

import canary_obs
from canary_obs.cli.output import note, write_out
from canary_obs.errors import ConfigurationError

SHARE = "share/canary_obs/"  # below the prefix of an installation, with the folders of a checkout
_MARK = SHARE + "docker/compose.yml"


class Part(StrEnum):
    """What can be written."""

    DASHBOARDS = "dashboards"
    ALERTS = "alerts"
    K8S = "k8s"
    COMPOSE = "compose"


# Folders of each part, and where they are written.
_FOLDERS: dict[Part, dict[str, str]] = {
    Part.DASHBOARDS: {"dashboards/generated": "."},
    Part.ALERTS: {"alerts/rules": "rules", "alerts/runbooks": "runbooks"},
    Part.K8S: {"docker/kubernetes": "."},
    # As in a checkout: the compose file names its neighbours.
    Part.COMPOSE: {folder: folder for folder in ("docker", "alerts/rules", "dashboards/generated")},
}


def export(
    part: Annotated[str, typer.Argument(metavar="dashboards|alerts|k8s|compose", help="What to write.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write to.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
) -> None:
    """Write dashboards, alert rules with runbooks, Kubernetes manifests or the compose files to a folder."""
    if part not in list(Part):
        raise ConfigurationError("export", part, "no such part", f"Use one of: {', '.join(Part)}.")
    files = shipped(Part(part))
    if (present := [name for name in files if (out / name).exists()]) and not force:
        rule = f"{len(present)} of the files exist there, {present[0]} among them"
        raise ConfigurationError("--out", str(out), rule, "Name a new folder, or give --force.")
    for name, source in files.items():
        target = out / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
        except OSError as error:
            rule = f"{target} cannot be written: {error.strerror}"
            raise ConfigurationError("--out", str(out), rule, "Name a folder that you may write.") from None
        write_out(f"{target}\n")
    if part == Part.COMPOSE:
        note("The images canary-obs-service and canary-obs-demo are built in a checkout, or come from yours.")


def shipped(part: Part) -> dict[str, Path]:
    """The files of a part by relative name. Raises ConfigurationError where this installation has none."""
    root = _root()
    found = {}
    for folder, below in _FOLDERS[part].items():
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found[(Path(below) / path.relative_to(root / folder)).as_posix()] = path
    if not found:
        remedy = "Install canary-obs from its wheel, or use a checkout."
        raise ConfigurationError("export", part.value, "this installation has none of its files", remedy)
    return found


def _root() -> Path:
    """The folder of an installation's files; a checkout, where the package is used from one, is its own."""
    checkout = Path(canary_obs.__file__).parents[1]
    if (checkout / "docker/compose.yml").is_file():
        return checkout
    try:
        recorded = metadata.distribution("canary-obs").files or ()
    except metadata.PackageNotFoundError:
        recorded = ()
    for entry in recorded:
        if entry.as_posix().endswith(_MARK):
            return Path(str(entry.locate())).resolve().parents[1]
    return checkout
