"""Results of the benches as tables and JSON, compared with goals and earlier results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.table import Table

from canary_obs.cli.output import print_rich, write_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    from canary_obs.bench.result import BenchResult


def print_result(result: BenchResult, *, as_json: bool) -> None:
    """One JSON line, or a table of the figures."""
    if as_json:
        write_out(json.dumps(result.to_json()) + "\n")
        return
    table = Table("figure", "value", title=result.title)
    for name, value in result.figures.items():
        table.add_row(name, str(value))
    print_rich(table)


def print_json_and_table(result: BenchResult, output: Path | None) -> None:
    """A table on standard error, one JSON line on standard output; the JSON also goes to `output`."""
    table = Table("figure", "value", title=result.title)
    for name, value in result.figures.items():
        table.add_row(name, json.dumps(value, indent=1) if isinstance(value, dict) else str(value))
    Console(file=sys.stderr).print(table)
    write_out(json.dumps(result.to_json()) + "\n")
    write_json(output, result.to_json())


def print_kernels(result: BenchResult, *, as_json: bool) -> None:
    """One JSON line, or a table with a row per measurement of `bench kernels`."""
    if as_json:
        print_result(result, as_json=True)
        return
    table = Table("work", "us", "TB/s", "of ceiling", "must reach", "", title=result.title)
    for row in result.figures["rows"]:
        measure = result.measures[row["work"]]
        sign = ">=" if measure.better == "higher" else "<="
        table.add_row(
            row["work"],
            f"{row['us']:.2f}",
            "" if row["tb_s"] is None else f"{row['tb_s']:.3f}",
            "" if row["ratio"] is None else f"{row['ratio']:.3f}",
            "" if measure.goal is None else f"{sign} {measure.goal:.3g}",
            "" if measure.goal is None else "yes" if measure.met else "NO",
        )
    print_rich(table, width=120)


def write_json(output: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures to `output`, if there is one; missing folders are created."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(figures, indent=1) + "\n")


def exit_with(result: BenchResult, baseline: Path | None = None) -> NoReturn:
    """Say what got worse, which goals are missed, and whether the figures count; 1 in the last two cases.

    Compares with `baseline`, or with the newest committed result of the same bench, plan and device.
    """
    for line in _compared(result, baseline):
        sys.stderr.write(f"{line}\n")
    for name, measure in result.missed.items():
        rule = "at most" if measure.better == "lower" else "at least"
        sys.stderr.write(f"goal missed: {name} is {measure.value:.4g}, must be {rule} {measure.goal:g}\n")
    if result.failed:
        reasons = ", ".join(f"{name} = {value}" for name, value in result.failed.items())
        sys.stderr.write(f"these figures do not count, as the canary was not sound: {reasons}; see its log\n")
    sys.exit(1 if result.failed or result.missed else 0)


def _compared(result: BenchResult, baseline: Path | None) -> Iterator[str]:
    from canary_obs.bench.comparison import compare, latest_of_its_kind, read_result

    found = latest_of_its_kind(result) if baseline is None else (baseline, read_result(baseline))
    if found is None:
        yield "not compared: no committed result has this bench, plan, engine and device (--baseline)"
        return
    path, earlier = found
    comparison = compare(result, earlier)
    yield f"compared with {path.name}: {comparison.compared} figures, {len(comparison.worse)} worse"
    yield from (f"worse: {sentence}" for sentence in comparison.worse)
    yield from (f"better: {sentence}" for sentence in comparison.better)
    yield from (f"not measured any more: {name}" for name in comparison.not_measured)
