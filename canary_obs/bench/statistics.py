"""What step times say: medians, percentiles, overhead of paired ones and its bootstrap interval."""

from __future__ import annotations

import json
import random
import statistics
import sys

from rich.console import Console
from rich.table import Table

_RESAMPLES = 2000
Pairs = list[tuple[float, float]]


def compare(pairs: Pairs, block_steps: int, seed: int) -> dict[str, object]:
    """Figures of (mode none, mode log) block times in seconds; overheads are ratios minus 1."""
    draw = random.Random(seed)
    spread = sorted(_overhead(draw.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    return {
        "pairs": len(pairs),
        "block_steps": block_steps,
        "step_ms_none": round(1e3 * statistics.median(none for none, _ in pairs) / block_steps, 3),
        "step_ms_log": round(1e3 * statistics.median(log for _, log in pairs) / block_steps, 3),
        "overhead": round(_overhead(pairs), 4),
        "overhead_median_pair": round(statistics.median(log / none for none, log in pairs) - 1, 4),
        "overhead_95": [round(spread[int(share * _RESAMPLES)], 4) for share in (0.025, 0.975)],
    }


def compared(times: dict[str, list[float]]) -> dict[str, float]:
    """Median milliseconds of each kind, and the median over rounds of its excess over the first kind."""
    first = next(iter(times))
    found = {f"{name}_ms": round(statistics.median(values), 4) for name, values in times.items()}
    for name, values in times.items():
        if name != first:
            ratios = [mine / theirs - 1 for mine, theirs in zip(values, times[first], strict=True)]
            found[f"{name}_over_{first}"] = round(statistics.median(ratios), 5)
    if "checks" in times and first == "none":
        ratios = [a / b - 1 for a, b in zip(times["checks_and_patrol"], times["checks"], strict=True)]
        found["patrol_over_checks"] = round(statistics.median(ratios), 5)
    return found


def percentiles(values: list[float]) -> dict[str, float]:
    """From the median to the largest, and how many there are."""
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
    found = {name: round(ordered[int(share * len(ordered))], 1) for name, share in shares.items()}
    return found | {"max": round(ordered[-1], 1), "calls": len(ordered)}


def show(title: str, result: dict[str, object], *, as_json: bool) -> None:
    """One JSON line, or a table."""
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    table = Table("figure", "value", title=title)
    for name, value in result.items():
        table.add_row(name, str(value))
    Console().print(table)


def exit_code(**wrong: object) -> int:
    """1, told on stderr, when something happened (its value is true) with which no figure counts."""
    met = [f"{name} = {value}" for name, value in wrong.items() if value]
    if met:
        sys.stderr.write(f"these figures are not those of a sound canary: {', '.join(met)}; see its log\n")
    return int(bool(met))


def _overhead(pairs: Pairs) -> float:
    return sum(log for _, log in pairs) / sum(none for none, _ in pairs) - 1
