"""Builds Grafana panels from the data of dashboards.board."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import (
    common as common_builders,
    dashboard as builders,
    prometheus,
    stat,
    statetimeline,
    table,
    text,
    timeseries,
)
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    DataSourceRef,
    GraphThresholdsStyleMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

from alerts.links import Links
from dashboards.board import SEVERITIES, Column, Link, Panel, PanelType, Query

SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
NEVER_NEGATIVE = 0.0
LETTERS = "ABCDEFGHIJ"


# Of a range query: a panel is some 700 pixels wide, and every point costs an evaluation over all ranks.
DATA_POINTS = 60
# The labels of a row that nobody reads.
_HIDDEN = ("Time", "__name__", "job", "service_address", "trace_id", "alertstate")


def build(panel: Panel, number: int, to: Links) -> Any:
    """The builder of one panel; `number` is its id, unique in a dashboard."""
    made = _blank(panel)
    made.id(number).title(panel.title).description(panel.description).span(panel.width).height(panel.height)
    if panel.type is PanelType.TEXT:
        return made
    made.datasource(SOURCE).unit(panel.unit).thresholds(_steps(panel)).max_data_points(DATA_POINTS)
    if panel.severity:
        made.mappings([_severities()])
    if panel.links:
        made.data_links([_link(link, to) for link in panel.links])
    for position, query in enumerate(panel.queries):
        made.with_target(_target(panel, query, LETTERS[position]))
    return made


def _stat() -> stat.Panel:
    last = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().reduce_options(last).color_mode(BigValueColorMode.BACKGROUND)


def _lines(panel: Panel) -> timeseries.Panel:
    style = common_builders.GraphThresholdsStyleConfig().mode(
        GraphThresholdsStyleMode.DASHED if len(panel.steps) > 1 else GraphThresholdsStyleMode.OFF
    )
    return (
        timeseries.Panel()
        .min(NEVER_NEGATIVE)
        .show_points(VisibilityMode.NEVER)
        .fill_opacity(8)
        .thresholds_style(style)
    )


def _states() -> statetimeline.Panel:
    return statetimeline.Panel().show_value(VisibilityMode.NEVER).merge_values(True)


def _blank(panel: Panel) -> Any:
    match panel.type:
        case PanelType.STAT:
            return _stat()
        case PanelType.LINES:
            return _lines(panel)
        case PanelType.STATES:
            return _states()
        case PanelType.TABLE:
            return _table(panel)
        case PanelType.TEXT:
            return text.Panel().mode(TextMode.MARKDOWN).content(panel.text.strip())


def _table(panel: Panel) -> table.Panel:
    made = table.Panel().with_transformation(DataTransformerConfig(id_val="merge", options={}))
    # The value of the only query has a name without its letter.
    names = ["Value"] if len(panel.queries) == 1 else [f"Value #{letter}" for letter in LETTERS]
    fields = dict(zip(names, panel.columns, strict=False))
    titles = {name: column.title for name, column in fields.items()}
    made.with_transformation(DataTransformerConfig(id_val="organize", options={"renameByName": titles}))
    # Hidden and not removed: the links of a row read them.
    for name in (*_HIDDEN, *(name for name in names[: len(panel.queries)] if name not in fields)):
        made.override_by_name(name, [DynamicConfigValue(id_val="custom.hidden", value=True)])
    for column in fields.values():
        made.override_by_name(column.title, _column(column))
    if panel.columns:
        made.sort_by(
            [common_builders.TableSortByFieldState().display_name(panel.columns[0].title).desc(True)]
        )
    return made


def _column(column: Column) -> list[DynamicConfigValue]:
    values = [DynamicConfigValue(id_val="unit", value=column.unit)]
    if column.severity:
        cell = {"type": "color-background", "mode": "basic"}
        values += [
            DynamicConfigValue(id_val="mappings", value=[_severities()]),
            DynamicConfigValue(id_val="custom.cellOptions", value=cell),
        ]
    return values


def _severities() -> ValueMap:
    return ValueMap(
        options={
            str(value): ValueMappingResult(text=text, color=colour, index=value)
            for value, (text, colour) in SEVERITIES.items()
        }
    )


def _link(link: Link, to: Links) -> builders.DashboardLink:
    url = link.url.replace("<<service>>", to.service_in_panel()).replace("<<runbooks>>", to.runbook_base)
    return builders.DashboardLink(link.title).type(DashboardLinkType.LINK).url(url).target_blank(True)


def _steps(panel: Panel) -> builders.ThresholdsConfig:
    steps = [Threshold(color=step.colour, value=step.value) for step in panel.steps]
    return builders.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _target(panel: Panel, query: Query, letter: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().datasource(SOURCE).expr(query.expression).ref_id(letter)
    target.legend_format(query.legend).exemplar(panel.exemplars)
    if panel.type is PanelType.TABLE:
        return target.instant().format(PromQueryFormat.TABLE)
    if panel.type is PanelType.STAT:
        return target.instant()
    return target.range()
