"""Dashboards as plain data: a board has sections of panels, a panel has queries."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from alerts import render

RANK = 'cluster=~"$cluster",instance=~"$instance",rank=~"$rank"'
GROUP = f'{RANK},group=~"$group"'
SERVICE = 'cluster=~"$cluster"'
NAME = "{{engine}}/{{instance}} rank {{rank}}"

# Why a query may return no data. All other queries must return data: tests/ops runs every one.
NO_FAULT = "only while something is wrong"
NO_PERTURBATION = "only where faults are injected"
NO_DRILL = "only where drills are enabled and one has run"
NO_RECEIVER = "only where an OTLP receiver is configured"
NO_WINDOW = "only where the model has sliding-window layers with slots of their own"
NO_SWEEP = "only after the first sweep"
NO_LONG_STEP = "only while a step delays the snapshots"


class PanelType(StrEnum):
    """Grafana panel type."""

    STAT = "stat"
    LINES = "timeseries"
    STATES = "state-timeline"
    TABLE = "table"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """PromQL with the legend of its series; `empty` = why it may return no data."""

    expression: str
    legend: str = NAME
    empty: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A threshold: the colour from this value on."""

    colour: str
    value: float | None = None  # None = the base colour


BAD_FROM_ONE = (Step(colour="green"), Step(colour="red", value=1))
BAD_BELOW_ONE = (Step(colour="red"), Step(colour="green", value=1))
PLAIN = (Step(colour="blue"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`width` in columns, of 24; `text` is the Markdown of a text panel."""

    title: str
    description: str
    queries: tuple[Query, ...] = ()
    type: PanelType = PanelType.LINES
    unit: str = "short"
    width: int = 12
    height: int = 8
    steps: tuple[Step, ...] = PLAIN
    exemplars: bool = False
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    description: str
    sections: tuple[Section, ...]


def rank(name: str, more: str = "") -> str:
    """A metric of the selected clusters, instances and ranks."""
    return f"kv_canary_{name}{{{RANK}{',' if more else ''}{more}}}"


def group(name: str, more: str = "") -> str:
    """A metric with a group label, of the selected groups too."""
    return f"kv_canary_{name}{{{GROUP}{',' if more else ''}{more}}}"


def recorded(name: str) -> str:
    """A recorded series of the selected ranks (alerts/rules/recording.yml)."""
    return f"rank:kv_canary_{name}{{{RANK}}}"


def service(name: str, more: str = "") -> str:
    """A metric of the service itself."""
    return f"kv_canary_{name}{{{SERVICE}{',' if more else ''}{more}}}"


def counted(series: str) -> str:
    """The increase of counters within the selected time range."""
    return render.counted(series, "$__range")


def firing(kinds: str) -> str:
    """Firing alerts whose label `kind` matches a regular expression."""
    return f'ALERTS{{alertstate="firing",kind=~"{kinds}",alertname=~"KVCanary.*"}}'
