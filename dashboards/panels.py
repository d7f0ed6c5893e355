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
from grafana_foundation_sdk.models.dashboard import Threshold, ThresholdsMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

from dashboards.board import Panel, PanelType, Query

SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
NEVER_NEGATIVE = 0.0


def build(panel: Panel, number: int) -> Any:
    """The builder of one panel; `number` is its id, unique in a dashboard."""
    made = _blank(panel)
    made.id(number).title(panel.title).description(panel.description).span(panel.width).height(panel.height)
    if panel.type is PanelType.TEXT:
        return made
    made.datasource(SOURCE).unit(panel.unit).thresholds(_steps(panel))
    for position, query in enumerate(panel.queries):
        made.with_target(_target(panel, query, "ABCDEFGH"[position]))
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
            return table.Panel()
        case PanelType.TEXT:
            return text.Panel().mode(TextMode.MARKDOWN).content(panel.text.strip())


def _steps(panel: Panel) -> builders.ThresholdsConfig:
    steps = [Threshold(color=step.colour, value=step.value) for step in panel.steps]
    return builders.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _target(panel: Panel, query: Query, letter: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().datasource(SOURCE).expr(query.expression).ref_id(letter)
    target.legend_format(query.legend).exemplar(panel.exemplars)
    if panel.type is PanelType.TABLE:
        return target.instant().format(PromQueryFormat.TABLE)
    return target.range()
