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
NO_HEALING = "only where an engine can be healed"
NO_TAINT = "only where an engine shows who holds which slots"
NO_DRILL = "only where drills are enabled and one has run"
NO_RECEIVER = "only where an OTLP receiver is configured"
NO_WINDOW = "only where the model has sliding-window layers with slots of their own"
NO_SWEEP = "only after the first sweep"
NO_REPLAY = "only where head and tail may be launched as one"
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


RED, VIOLET, AMBER, GREEN, GREY = "#E02F44", "#8F3BB8", "#FF9830", "#56A64B", "#8E8E8E"
BAD_FROM_ONE = (Step(colour=GREEN), Step(colour=RED, value=1))
BAD_BELOW_ONE = (Step(colour=RED), Step(colour=GREEN, value=1))
PLAIN = (Step(colour="blue"),)

# Text and colour of the recorded series state:severity (alerts/templates/recording.yml).
SEVERITIES = {
    0: ("ok", GREEN),
    1: ("off", GREY),
    2: ("degraded", AMBER),
    3: ("blind", VIOLET),
    4: ("violated", RED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What a table shows of the query with this position (0 = the first)."""

    title: str
    unit: str = "short"
    severity: bool = False  # the value is one of SEVERITIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link of a row. `url` may have ${__data.fields.LABEL}, and <<service>> and <<runbooks>> (alerts.links)."""

    title: str
    url: str


_FROM_ROW = "var-cluster=${__data.fields.cluster}&var-instance=${__data.fields.instance}"
TO_ENGINE = Link(title="Engine", url=f"/d/kv-canary-engine?{_FROM_ROW}&${{__url_time_range}}")
TO_INCIDENTS = Link(title="Incidents", url=f"/d/kv-canary-incident?{_FROM_ROW}&${{__url_time_range}}")
TO_RANK = Link(
    title="Engine of this rank",
    url=f"/d/kv-canary-engine?{_FROM_ROW}&var-rank=${{__data.fields.rank}}&${{__url_time_range}}",
)
TO_INCIDENT = Link(title="This incident", url="<<service>>/incidents/${__data.fields.incident_id}")
TO_TRACE = Link(
    title="Its trace",
    url='/explore?left={"datasource":"tempo","queries":[{"refId":"A","datasource":{"type":"tempo","uid":"tempo"},'
    '"queryType":"traceql","query":"${__data.fields.trace_id}"}],"range":{"from":"now-24h","to":"now"}}',
)
TO_RUNBOOK = Link(title="Runbook", url="<<runbooks>>/${__data.fields.alertname}.md")
TO_DAMAGE_RUNBOOK = Link(title="Runbook", url="<<runbooks>>/KVCanaryDamage.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`width` in columns, of 24; `text` is the Markdown of a text panel.

    A table has a row for each label set: the queries' values are its columns, worst first by the first one.
    """

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
    columns: tuple[Column, ...] = ()
    links: tuple[Link, ...] = ()
    severity: bool = False  # values are SEVERITIES


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
    one_instance: bool = False  # the variable `instance` has one value, and not All


def rank(name: str, more: str = "") -> str:
    """A metric of the selected clusters, instances and ranks."""
    return f"kv_canary_{name}{{{RANK}{',' if more else ''}{more}}}"


def group(name: str, more: str = "") -> str:
    """A metric with a group label, of the selected groups too."""
    return f"kv_canary_{name}{{{GROUP}{',' if more else ''}{more}}}"


def recorded(name: str) -> str:
    """A recorded series of the selected ranks (alerts/rules/recording.yml)."""
    return f"rank:kv_canary_{name}{{{RANK}}}"


def over_ranks(name: str, more: str = "") -> str:
    """A recorded series of the selected instances, over their ranks."""
    labels = 'cluster=~"$cluster",instance=~"$instance"'
    return f"engine:kv_canary_{name}{{{labels}{',' if more else ''}{more}}}"


def service(name: str, more: str = "") -> str:
    """A metric of the service itself."""
    return f"kv_canary_{name}{{{SERVICE}{',' if more else ''}{more}}}"


def bands(expression: str, label: str = "", *, low: bool = False, empty: str = "") -> tuple[Query, ...]:
    """The extreme, the 99th percentile and the median over ranks; with `low` the low values are the bad ones."""
    worst, quantile, name = ("min", 0.01, "lowest") if low else ("max", 0.99, "highest")
    prefix = f"{label}, " if label else ""
    return (
        Query(expression=f"{worst}({expression})", legend=prefix + name, empty=empty),
        Query(
            expression=f"quantile({quantile}, {expression})",
            legend=f"{prefix}p{100 * quantile:g}",
            empty=empty,
        ),
        Query(expression=f"quantile(0.5, {expression})", legend=f"{prefix}median", empty=empty),
    )


def counted(series: str) -> str:
    """The increase of counters within the selected time range."""
    return render.counted(series, "$__range")


def firing(kinds: str) -> str:
    """Firing alerts whose label `kind` matches a regular expression."""
    return f'ALERTS{{alertstate="firing",kind=~"{kinds}",alertname=~"KVCanary.*"}}'
