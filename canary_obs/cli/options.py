"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, traffic and perturbation.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Shape = Annotated[str, typer.Option(help="Engine preset: demo or tiny.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads; more pay only on otherwise idle cores.")]
Output = Annotated[Path | None, typer.Option(help="Write the JSON to this file, too.")]
