"""`canary-obs fleet`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from canary_obs.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from canary_obs.fleet.report import FleetReport

fleet = typer.Typer(no_args_is_help=True, help="Judge the GPUs of a fleet.")


@fleet.callback()
def _group() -> None:
    """Judge the GPUs of a fleet."""


@fleet.command("report")
def report(
    prometheus: Annotated[str, typer.Option(metavar="URL", help="A Prometheus with the recording rules.")],
    token: Annotated[
        str, typer.Option(envvar="PROMETHEUS_TOKEN", help="Bearer token, if it asks for one.")
    ] = "",
    form: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    """Print the suspects: which GPU, link or release damages KV cache, why, and what to do next."""
    import msgspec

    from canary_obs.cli.output import print_rich, write_out
    from canary_obs.fleet.prometheus import PrometheusSource
    from canary_obs.fleet.report import fleet_report
    from canary_obs.fleet.verdict import assess

    if form not in ("text", "json"):
        raise ConfigurationError("--format", form, "no such format", "Use text or json.")
    source = PrometheusSource(prometheus, token)
    evidence = source.evidence()
    found = fleet_report(evidence, assess(evidence), source.places())
    if form == "json":
        write_out(msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n")
    else:
        print_rich(_text(found))


def _text(found: FleetReport) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    head = f"{found.judged_gpus} GPUs judged over seven days, {len(found.gpus)} with findings."
    if not found.judged_gpus:
        head = "No GPU has verified bytes that are known here: load the rules (alerts/rules/fleet.yml)."
    parts: list[RenderableType] = [head]
    for release in found.releases:
        name = f"{release.engine} {release.engine_version} {release.model}"
        why = "; ".join(release.reasons)
        parts.append(f"Suspect release {escape(name)}: {why}. Go back to the one before.")
    if found.gpus:
        table = Table("GPU", "where", "verdict", "score", "why", "next step")
        for gpu in found.gpus:
            place = " ".join(part for part in (gpu.node, gpu.pci_bus_id, gpu.gpu_model) if part)
            why = "; ".join(gpu.reasons)
            row = (gpu.gpu_uuid, place, gpu.verdict, f"{gpu.score:.1f}", why, gpu.next_step)
            table.add_row(*map(escape, row))
        parts.append(table)
    return Group(*parts)
