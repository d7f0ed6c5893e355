"""Results of the benches as tables and JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from canary_obs.bench.result import BenchResult


def print_result(result: BenchResult, *, as_json: bool) -> None:
    """One JSON line, or a table of the figures."""
    if as_json:
        sys.stdout.write(json.dumps(result.figures) + "\n")
        return
    table = Table("figure", "value", title=result.title)
    for name, value in result.figures.items():
        table.add_row(name, str(value))
    Console().print(table)


def print_json_and_table(result: BenchResult, output: Path | None) -> None:
    """A table on standard error, one JSON line on standard output; the JSON also goes to `output`."""
    table = Table("figure", "value", title=result.title)
    for name, value in result.figures.items():
        table.add_row(name, json.dumps(value, indent=1) if isinstance(value, dict) else str(value))
    Console(file=sys.stderr).print(table)
    sys.stdout.write(json.dumps(result.figures) + "\n")
    write_json(output, result.figures)


def print_kernels(result: BenchResult, *, as_json: bool) -> None:
    """One JSON line, or a table with a row per measurement of `bench kernels`."""
    if as_json:
        print_result(result, as_json=True)
        return
    table = Table("work", "us", "TB/s", "of ceiling", "must reach", "", title=result.title)
    for row in result.figures["rows"]:
        table.add_row(
            row["work"],
            f"{row['us']:.2f}",
            "" if row["tb_s"] is None else f"{row['tb_s']:.3f}",
            "" if row["ratio"] is None else f"{row['ratio']:.3f}",
            row["limit"],
            {None: "", True: "yes", False: "NO"}[row["met"]],
        )
    Console(width=120).print(table)


def write_json(output: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures to `output`, if there is one; missing folders are created."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(figures, indent=1) + "\n")


def exit_with(result: BenchResult) -> NoReturn:
    """Exit code 1, with the reason on standard error, when the figures do not count; 0 otherwise."""
    if result.failed:
        reasons = ", ".join(f"{name} = {value}" for name, value in result.failed.items())
        sys.stderr.write(f"these figures do not count, as the canary was not sound: {reasons}; see its log\n")
    sys.exit(1 if result.failed else 0)
