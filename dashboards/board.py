"""What a dashboard is made of here: boards of sections of panels of queries, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from alerts import render

RANK = 'cluster=~"$cluster",instance=~"$instance",rank=~"$rank"'
GROUP = f'{RANK},group=~"$group"'
SERVICE = 'cluster=~"$cluster"'
NAME = "{{engine}}/{{instance}} rank {{rank}}"

# Why a query may have nothing to show; every other query must answer with data (tests/ops asks them all).
NO_FAULT = "only while something is wrong"
NO_PERTURBATION = "only where faults are planted"
NO_DRILL = "only where drills are on, and one was run"
NO_RECEIVER = "only where an OTLP receiver is configured"
NO_WINDOW = "only where the model has sliding-window layers with slots of their own"
NO_SWEEP = "only once a sweep has run"


class Kind(StrEnum):
    """How a panel draws."""

    STAT = "stat"
    LINES = "timeseries"
    STATES = "state-timeline"
    TABLE = "table"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """PromQL with the legend of its series; `empty` says why it may have no data."""

    expression: str
    legend: str = NAME
    empty: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A colour from this value on."""

    colour: str
    value: float | None = None  # None = from the bottom


BAD_FROM_ONE = (Step(colour="green"), Step(colour="red", value=1))
BAD_BELOW_ONE = (Step(colour="red"), Step(colour="green", value=1))
PLAIN = (Step(colour="blue"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`width` of 24 columns; `text` is what a text panel shows, as Markdown."""

    title: str
    says: str
    queries: tuple[Query, ...] = ()
    kind: Kind = Kind.LINES
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
    says: str
    sections: tuple[Section, ...]


def rank(name: str, more: str = "") -> str:
    """A rank's metric under the chosen cluster, instance and rank."""
    return f"kv_canary_{name}{{{RANK}{',' if more else ''}{more}}}"


def group(name: str, more: str = "") -> str:
    """A metric with a group label, under the chosen group too."""
    return f"kv_canary_{name}{{{GROUP}{',' if more else ''}{more}}}"


def recorded(name: str) -> str:
    """A recorded series of ranks (alerts/rules/recording.yml)."""
    return f"rank:kv_canary_{name}{{{RANK}}}"


def service(name: str, more: str = "") -> str:
    """A metric of the service itself."""
    return f"kv_canary_{name}{{{SERVICE}{',' if more else ''}{more}}}"


def counted(series: str) -> str:
    """What counters counted within the chosen range."""
    return render.counted(series, "$__range")


def firing(kinds: str) -> str:
    """Alerts that fire now, of some kinds."""
    return f'ALERTS{{alertstate="firing",kind=~"{kinds}",alertname=~"KVCanary.*"}}'
