"""Where alerts and dashboards lead: the service, the incident, the dashboard and the runbook.

Each base URL is an option of `python -m alerts.render` and `python -m dashboards.build`, and a variable of
`make ops-files`: RUNBOOK_BASE, SERVICE_URL and GRAFANA_URL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import typer

from canary_obs.config import RUNBOOK_BASE

SERVICE_URL = "http://{service_address}"
GRAFANA_URL = "http://localhost:3000"

# Labels that SERVICE_URL may contain. The scrape configuration sets `cluster` and `service_address`.
URL_LABELS = ("cluster", "engine", "instance", "service_address")
# Read by whoever opens a link of a Prometheus whose scrape configuration lacks the label.
NO_ADDRESS = "label-service_address-is-not-set.invalid"

_LABEL = re.compile(r"\{(\w+)\}")
_LOOKUP = (
    "{{ with printf `kv_canary_incident_info{engine=%q,instance=%q,rank=%q}`"
    " $labels.engine $labels.instance $labels.rank | query }}"
)
_ID = "{{ . | first | label `incident_id` }}"
# Go templates about the rank's latest incident; empty, or UNKNOWN_INCIDENT, without one.
UNKNOWN_INCIDENT = "not yet known"
INCIDENT_ID = _LOOKUP + _ID + "{{ else }}" + UNKNOWN_INCIDENT + "{{ end }}"
INCIDENT_PATH = _LOOKUP + "incidents/" + _ID + "{{ end }}"
FINDING = (
    _LOOKUP + "{{ with first . }}: {{ .Labels.reason }} in {{ .Labels.group }} slot {{ .Labels.slot }}"
    "{{ if .Labels.position }}, position {{ .Labels.position }}{{ end }}"
    "{{ if .Labels.request }}, request {{ .Labels.request }}{{ end }}"
    ", found by the {{ .Labels.phase }} check{{ end }}{{ end }}"
)

_BOARD_OF_KIND = {
    "damage": "kv-canary-incident",
    "blind": "kv-canary-trust",
    "debt": "kv-canary-trust",
    "watchdog": "kv-canary-fleet",
}
_VARIABLES = (
    "{{ if $labels.cluster }}&var-cluster={{ $labels.cluster | urlquery }}{{ end }}"
    # Alerts about the service itself have its address as `instance`, which no panel selects by.
    "{{ if $labels.engine }}&var-instance={{ $labels.instance | urlquery }}{{ end }}"
    "{{ if $labels.rank }}&var-rank={{ $labels.rank | urlquery }}{{ end }}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Base URLs without a final slash. `service_url` may contain `{label}` of URL_LABELS."""

    runbook_base: str = RUNBOOK_BASE
    service_url: str = SERVICE_URL
    grafana_url: str = GRAFANA_URL

    def service_in_rule(self) -> str:
        """The service's URL in a rule's annotation."""
        return _LABEL.sub(
            lambda label: (
                f"{{{{ or $labels.{label[1]} `{NO_ADDRESS}` }}}}"
                if label[1] == "service_address"
                else f"{{{{ $labels.{label[1]} }}}}"
            ),
            self.service_url,
        )

    def service_in_panel(self) -> str:
        """The service's URL in a data link of a Grafana table whose rows have the labels as fields."""
        return _LABEL.sub(r"${__data.fields.\1}", self.service_url)

    def of_alert(self, name: str, kind: str, text: str) -> dict[str, str]:
        """Annotations with the alert's links; `text` is its rule, and `kind` the label of that name."""
        board = f"{self.grafana_url}/d/{_BOARD_OF_KIND[kind]}?from=now-3h&to=now"
        links = {"runbook_url": f"{self.runbook_base}/{name}.md"}
        if "$labels." not in text:  # about no series, so about no service
            return links | {"dashboard_url": board}
        service = self.service_in_rule()
        links |= {"service_url": service, "dashboard_url": board + _VARIABLES}
        if kind == "damage":
            links |= {"incident": INCIDENT_ID, "incident_url": f"{service}/{INCIDENT_PATH}"}
        return links


DEFAULT = Links()


def _base(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{text!r} is not an http:// or https:// URL")
    return text.rstrip("/")


def _labelled(text: str) -> str:
    if unknown := sorted(set(_LABEL.findall(text)) - set(URL_LABELS)):
        raise typer.BadParameter(f"{{{unknown[0]}}} is no label of every alert; use {', '.join(URL_LABELS)}")
    return _base(text)


RunbookBase = Annotated[
    str,
    typer.Option(envvar="RUNBOOK_BASE", metavar="URL", callback=_base, help="Folder of the runbooks."),
]
ServiceUrl = Annotated[
    str,
    typer.Option(
        envvar="SERVICE_URL",
        metavar="URL",
        callback=_labelled,
        help="The service, as people reach it; {instance} and other labels are filled in.",
    ),
]
GrafanaUrl = Annotated[
    str, typer.Option(envvar="GRAFANA_URL", metavar="URL", callback=_base, help="Grafana.")
]
