"""`canary-obs export`: what this release ships for Prometheus, Grafana, Kubernetes and engines, as files."""

from __future__ import annotations

from collections.abc import Mapping
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
    PLUGIN = "plugin"


# Folders of each part, and where they are written.
_FOLDERS: dict[Part, dict[str, str]] = {
    Part.DASHBOARDS: {"dashboards/generated": "."},
    Part.ALERTS: {"alerts/rules": "rules", "alerts/runbooks": "runbooks"},
    Part.K8S: {"docker/kubernetes": "."},
    # As in a checkout: the compose file names its neighbours.
    Part.COMPOSE: {folder: folder for folder in ("docker", "alerts/rules", "dashboards/generated")},
}
# What an engine imports. canary_kernels is next to canary_obs in an installation.
_PACKAGES = ("canary_obs", "canary_kernels", "kernels/canary_kernels")


def export(
    part: Annotated[
        str, typer.Argument(metavar="dashboards|alerts|k8s|compose|plugin", help="What to write.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write to.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
) -> None:
    """Write dashboards, alert rules and runbooks, Kubernetes or compose files, or the plugin, to a folder.

    The plugin is this package: an engine with the folder in its PYTHONPATH needs nothing installed.
    """
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
            target.write_bytes(source)
        except OSError as error:
            rule = f"{target} cannot be written: {error.strerror}"
            raise ConfigurationError("--out", str(out), rule, "Name a folder that you may write.") from None
        write_out(f"{target}\n")
    if part == Part.COMPOSE:
        note("The images canary-obs-service and canary-obs-demo are built in a checkout, or come from yours.")


def shipped(part: Part) -> dict[str, bytes]:
    """The files of a part by relative name. Raises ConfigurationError where this installation has none."""
    found = _plugin() if part is Part.PLUGIN else _below(_root(), _FOLDERS[part])
    if not found:
        remedy = "Install canary-obs from its wheel, or use a checkout."
        raise ConfigurationError("export", part.value, "this installation has none of its files", remedy)
    return found


def _below(root: Path, folders: Mapping[str, str]) -> dict[str, bytes]:
    found = {}
    for folder, below in folders.items():
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found[(Path(below) / path.relative_to(root / folder)).as_posix()] = path.read_bytes()
    return found


def _plugin() -> dict[str, bytes]:
    packages = {folder: Path(folder).name for folder in _PACKAGES}
    found = _below(Path(canary_obs.__file__).parents[1], packages)
    try:
        installed = metadata.distribution("canary-obs")
    except metadata.PackageNotFoundError:
        return {}  # without entry points no engine would find it
    described = f"Metadata-Version: 2.1\nName: canary-obs\nVersion: {installed.version}\n"
    entry_points = installed.read_text("entry_points.txt") or ""
    folder = f"canary_obs-{installed.version}.dist-info"
    return found | {
        f"{folder}/METADATA": described.encode(),
        f"{folder}/entry_points.txt": entry_points.encode(),
    }


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
