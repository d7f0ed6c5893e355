"""What a board's panels show, asked of a Prometheus as Grafana asks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Get = Callable[..., Any]  # path and parameters of Prometheus's HTTP API -> the `data` of its answer
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a panel. `points` are (seconds, value), oldest first; NaN is left out."""

    target: int  # its place among the panel's targets
    name: str
    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        """The newest value."""
        return self.points[-1][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is asked for: the `seconds` until `end`, seconds since the epoch."""

    end: float
    seconds: float


def series_of(
    panel: dict[str, Any], get: Get, fill: Callable[[str], str], moment: Moment
) -> tuple[Series, ...]:
    """Every series of a panel's targets; `fill` replaces Grafana's variables."""
    found: list[Series] = []
    for place, target in enumerate(panel.get("targets") or ()):
        expression = fill(target["expr"])
        if target.get("instant"):
            rows = get("query", query=expression, time=str(moment.end))["result"]
            samples = [(row["metric"], [row["value"]]) for row in rows]
        else:
            rows = get(
                "query_range", query=expression, start=str(moment.end - moment.seconds), end=str(moment.end),
                step=str(moment.seconds / panel["maxDataPoints"]),
            )["result"]  # fmt: skip
            samples = [(row["metric"], row["values"]) for row in rows]
        for labels, values in samples:
            points = tuple((float(at), float(value)) for at, value in values if float(value) == float(value))
            if points:
                name = _name(target.get("legendFormat") or "", labels)
                found.append(Series(target=place, name=name, labels=labels, points=points))
    return tuple(found)


def _name(legend: str, labels: dict[str, str]) -> str:
    if not legend:
        return ", ".join(f"{name}={value}" for name, value in labels.items()) or "value"
    return _LABEL.sub(lambda match: labels.get(match[1], ""), legend)
