"""Medians and percentiles of step times; overheads with their bootstrap intervals."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from canary_obs.bench.result import Measure

_RESAMPLES = 2000
_INTERVAL = 0.025, 0.975
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
Pairs = list[tuple[float, float]]  # seconds of a block without the canary, and of the same block with it


def paired_overhead(pairs: Pairs, block_steps: int, seed: int) -> dict[str, Any]:
    """Step times in milliseconds, and overheads (ratio minus 1) with a 95 % percentile-bootstrap interval."""
    # Not scipy.stats.bootstrap: on 20 pairs it needs 1.5 ms where this needs 5 ms and agrees within
    # its noise (1.8 to 6.6 % against 2.0 to 6.6 %), but importing it takes 490 ms and it weighs 143 MB.
    low, high = _interval(_overhead, pairs, seed)
    return {
        "pairs": len(pairs),
        "block_steps": block_steps,
        "step_ms_none": round(1e3 * statistics.median(none for none, _ in pairs) / block_steps, 3),
        "step_ms_log": round(1e3 * statistics.median(log for _, log in pairs) / block_steps, 3),
        "overhead": round(_overhead(pairs), 4),
        "overhead_median_pair": round(statistics.median(log / none for none, log in pairs) - 1, 4),
        "overhead_95": [round(low, 4), round(high, 4)],
    }


def overhead_measure(figures: dict[str, Any], goal: float | None = None) -> Measure:
    """The overhead of `paired_overhead`; its noise is half of its interval."""
    low, high = figures["overhead_95"]
    return Measure(value=figures["overhead"], noise=round((high - low) / 2, 5), goal=goal)


def overhead_measures(times: dict[str, list[float]], name: str, goal: float | None) -> dict[str, Measure]:
    """Median overhead of each variant over the first one, as in `overhead_by_variant`, with its noise."""
    first, *others = times
    measures = {}
    for other in others:
        ratios = [mine / base - 1 for mine, base in zip(times[other], times[first], strict=True)]
        low, high = _interval(statistics.median, ratios, 1)
        measures[f"{name}: {other} over {first}"] = Measure(
            value=round(statistics.median(ratios), 5), noise=round((high - low) / 2, 5), goal=goal
        )
    return measures


def overhead_by_variant(times: dict[str, list[float]]) -> dict[str, float]:
    """Median milliseconds of each variant, and its median overhead over the first one, round by round.

    `times` holds milliseconds of each round; raises ValueError when variants differ in rounds.
    """
    first = next(iter(times))
    found = {f"{name}_ms": round(statistics.median(values), 4) for name, values in times.items()}
    for name in times:
        if name != first:
            found[f"{name}_over_{first}"] = _median_overhead(times[name], times[first])
    if "checks" in times and first == "none":
        found["patrol_over_checks"] = _median_overhead(times["checks_and_patrol"], times["checks"])
    return found


def added_noise(pairs: Pairs) -> float:
    """Half of the 95 % interval of the median difference, in seconds."""
    low, high = _interval(statistics.median, [log - none for none, log in pairs], 1)
    return (high - low) / 2


def percentiles(values: list[float]) -> dict[str, float]:
    """Nearest-rank percentiles (p50, p90, p99, p999), the largest value, and the number of values."""
    ordered = sorted(values)
    found = {name: round(ordered[int(share * len(ordered))], 1) for name, share in _QUANTILES.items()}
    return found | {"max": round(ordered[-1], 1), "calls": len(ordered)}


def median_ratio(pairs: Pairs, seed: int) -> dict[str, Any]:
    """Medians of both columns, and their ratio (with / without) with a 95 % bootstrap interval over pairs."""
    none, log = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "pairs": len(pairs),
        "none": round(none, 4),
        "log": round(log, 4),
        "ratio": round(_ratio_of_medians(pairs), 5),
        "ratio_95": [round(end, 5) for end in _interval(_ratio_of_medians, pairs, seed)],
        "each": [[round(value, 4) for value in pair] for pair in pairs],
    }


def rank(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def _ratio_of_medians(pairs: Pairs) -> float:
    return statistics.median(log for _, log in pairs) / statistics.median(none for none, _ in pairs)


def _interval(of: Callable[[Any], float], values: list[Any], seed: int) -> list[float]:
    """95 % percentile-bootstrap interval of a statistic of the values."""
    draw = random.Random(seed)
    resampled = sorted(of(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return [resampled[int(share * _RESAMPLES)] for share in _INTERVAL]


def _overhead(pairs: Pairs) -> float:
    return sum(log for _, log in pairs) / sum(none for none, _ in pairs) - 1


def _median_overhead(times: list[float], base: list[float]) -> float:
    return round(statistics.median(mine / other - 1 for mine, other in zip(times, base, strict=True)), 5)
