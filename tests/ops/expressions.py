"""All PromQL expressions of the repository: panels, annotations, variables, alerts, recording rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from alerts.render import RULES
from dashboards.board import NO_FAULT, NO_PERTURBATION
from dashboards.build import BOARDS, GENERATED

# Values that Grafana substitutes at a scrape interval of 1 s and a time range of 30 minutes.
_MACROS = {"$__rate_interval": "5s", "$__range": "30m", "$datasource": "prometheus"}
_VARIABLE = re.compile(r"\$(cluster|instance|rank|group)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardQuery:
    """A query as Grafana sends it; `empty` = why it may return no data."""

    where: str
    expression: str
    empty: str

    def may_be_empty(self, with_fault: bool) -> bool:
        """Whether the query may return no data; with a fault, queries that show faults may not."""
        return bool(self.empty) and not (with_fault and self.empty in (NO_FAULT, NO_PERTURBATION))


def substituted(expression: str, instance: str = ".*") -> str:
    """The expression with Grafana's variables and macros filled in."""
    expression = expression.replace("$instance", instance)
    for macro, value in _MACROS.items():
        expression = expression.replace(macro, value)
    return _VARIABLE.sub(".*", expression)


def panel_queries() -> list[DashboardQuery]:
    """Every target of every panel in the generated files."""
    reasons = {
        query.expression: query.empty
        for board in BOARDS
        for section in board.sections
        for panel in section.panels
        for query in panel.queries
    }
    return [
        DashboardQuery(
            where=f"{path.stem}: {panel['title']}",
            expression=substituted(target["expr"]),
            empty=reasons[target["expr"]],
        )
        for path in sorted(GENERATED.glob("*.json"))
        for panel in panels_of(json.loads(path.read_text("utf-8")))
        for target in panel.get("targets") or ()
    ]


def panels_of(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel of a generated dashboard, those in collapsed rows too."""
    for panel in content["panels"]:
        yield panel
        yield from panel.get("panels") or ()


def _rules() -> list[dict[str, Any]]:
    files = [yaml.safe_load(path.read_text("utf-8")) for path in sorted(RULES.glob("*.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def alert_expressions() -> list[tuple[str, str]]:
    """Every alert with its expression."""
    return [(rule["alert"], rule["expr"]) for rule in _rules() if "alert" in rule]


def recorded_series() -> dict[str, str]:
    """Every recorded series with its expression."""
    return {rule["record"]: rule["expr"] for rule in _rules() if "record" in rule}
