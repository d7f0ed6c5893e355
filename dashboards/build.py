"""The dashboards as JSON: `python -m dashboards.build` rewrites dashboards/generated.

Their links lead where those of the alerts do: alerts.links has the options.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from grafana_foundation_sdk.builders import dashboard as builders, prometheus
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from alerts.links import (
    DEFAULT,
    GRAFANA_URL,
    SERVICE_URL,
    GrafanaUrl,
    Links,
    RunbookBase,
    ServiceUrl,
)
from canary_obs.config import RUNBOOK_BASE
from dashboards.board import Board
from dashboards.boards import cost, engine, fleet, gpus, incident, trust
from dashboards.panels import SOURCE, build

GENERATED = Path(__file__).parent / "generated"
BOARDS = (fleet.BOARD, engine.BOARD, incident.BOARD, trust.BOARD, cost.BOARD, gpus.BOARD)
TAG = "kv-canary"

# Each lists the values that the ones before it leave.
_VARIABLES = {
    "cluster": "label_values(kv_canary_service_state, cluster)",
    "instance": 'label_values(kv_canary_state{cluster=~"$cluster"}, instance)',
    "rank": 'label_values(kv_canary_state{cluster=~"$cluster",instance=~"$instance"}, rank)',
    "group": 'label_values(kv_canary_pool_bytes{cluster=~"$cluster",instance=~"$instance"}, group)',
}
_ANNOTATIONS = {
    "Violations": (
        "red",
        'sum by (engine, instance, reason) (engine:kv_canary_violations:rate1m{cluster=~"$cluster",instance=~"$instance"}) > 0',
        "{{engine}}/{{instance}}: {{reason}}",
    ),
    # No increase includes them: the series began with this value.
    "Counted before the first scrape": (
        "orange",
        '(rank:kv_canary_violations:total{cluster=~"$cluster",instance=~"$instance"} > 0)'
        ' unless last_over_time(rank:kv_canary_violations:total{cluster=~"$cluster",instance=~"$instance"}[1h] offset 1m)',
        "{{engine}}/{{instance}} rank {{rank}}: violations that were counted before Prometheus knew this rank",
    ),
    "Sweeps": (
        "blue",
        'increase(kv_canary_sweep_passes_total{cluster=~"$cluster",instance=~"$instance"}[1m]) > 0',
        "{{engine}}/{{instance}} rank {{rank}}: sweep ({{trigger}})",
    ),
}


def rendered(links: Links = DEFAULT) -> dict[Path, str]:
    """Path and content of every dashboard file."""
    return {
        GENERATED / f"{board.uid}.json": json.dumps(as_json(board, links), indent=2, sort_keys=True) + "\n"
        for board in BOARDS
    }


def as_json(board: Board, links: Links = DEFAULT) -> dict[str, Any]:
    """A dashboard in Grafana's JSON model."""
    made = _frame(board, links)
    number = 0
    for section in board.sections:
        number += 1
        made.with_row(builders.Row(section.title).id(number))
        for panel in section.panels:
            number += 1
            made.with_panel(build(panel, number, links))
    content: dict[str, Any] = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    for variable in content["templating"]["list"]:
        # The SDK puts an interval variable's fields on every variable; Grafana's schema refuses them.
        for name in ("auto", "auto_count", "auto_min"):
            variable.pop(name, None)
    return content


def _frame(board: Board, links: Links) -> builders.Dashboard:
    made = builders.Dashboard(board.title).uid(board.uid).description(board.description).tags([TAG])
    made.refresh("10s").time("now-30m", "now").timezone("browser").editable()
    made.link(
        builders.DashboardLink("KV canary").type(DashboardLinkType.DASHBOARDS).tags([TAG])
        .as_dropdown(True).include_vars(True).keep_time(True)
    )  # fmt: skip
    made.link(
        builders.DashboardLink("Runbooks")
        .type(DashboardLinkType.LINK)
        .url(links.runbook_base)
        .target_blank(True)
    )
    made.with_variable(builders.DatasourceVariable("datasource").type("prometheus").label("Data source"))
    for name, query in _VARIABLES.items():
        made.with_variable(_variable(name, query, single=board.one_instance and name == "instance"))
    for name, (colour, expression, title) in _ANNOTATIONS.items():
        target = prometheus.Dataquery().expr(expression).ref_id("Anno").datasource(SOURCE)
        made.annotation(
            builders.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour)
            .title_format(title).target(target)
        )  # fmt: skip
    return made


def _variable(name: str, query: str, *, single: bool) -> builders.QueryVariable:
    variable = builders.QueryVariable(name).label(name.capitalize()).datasource(SOURCE)
    variable.query({"query": query, "refId": name}).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable.sort(VariableSort.NATURAL_ASC)
    if single:  # Grafana takes the first one
        return variable.include_all(False).multi(False)
    everything = VariableOption(selected=True, text="All", value="$__all")
    return variable.include_all(True).multi(True).all_value(".*").current(everything)


def annotation_expressions() -> dict[str, str]:
    """PromQL of every annotation, by name."""
    return {name: expression for name, (_, expression, _) in _ANNOTATIONS.items()}


def variable_queries() -> dict[str, str]:
    """Query of every dashboard variable, by name."""
    return dict(_VARIABLES)


def main(
    runbook_base: RunbookBase = RUNBOOK_BASE,
    service_url: ServiceUrl = SERVICE_URL,
    grafana_url: GrafanaUrl = GRAFANA_URL,
) -> None:
    """Write the dashboard files."""
    links = Links(runbook_base=runbook_base, service_url=service_url, grafana_url=grafana_url)
    for path, content in rendered(links).items():
        path.write_text(content, "utf-8")


if __name__ == "__main__":
    typer.run(main)
