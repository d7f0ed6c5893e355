"""Generated files are committed and current; `make ops-files` rewrites them."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import alerts.render
import alerts.tests.build
import dashboards.build
import dashboards.manifests
from alerts.links import Links
from canary_obs.telemetry.metric_docs import Format, render

METRICS = Path(__file__).parents[2] / "docs/metrics.md"
OPTIONS = ("runbook_base", "service_url", "grafana_url")
LINKS = Links(**{name: os.environ[name.upper()] for name in OPTIONS if name.upper() in os.environ})
RENDERED = {
    "rules": partial(alerts.render.rendered, LINKS),
    "rule tests": alerts.tests.build.rendered,
    "dashboards": partial(dashboards.build.rendered, LINKS),
    "manifests": dashboards.manifests.chart_files,  # the base: test_kubernetes_schema.py, which renders it
}


@pytest.mark.parametrize("kind", RENDERED)
def test_generated_files_are_current(kind) -> None:
    files = RENDERED[kind]()
    assert files
    for path, text in files.items():
        assert path.read_text("utf-8") == text, f"{path} is out of date: run make ops-files"
    folders = {path.parent for path in files}
    suffixes = {path.suffix for path in files}
    assert {path for folder in folders for path in folder.glob("*") if path.suffix in suffixes} == set(files)


def test_the_metrics_page_is_current() -> None:
    assert METRICS.read_text("utf-8") == render(Format.MD) + "\n", "run make ops-files"


@pytest.mark.parametrize("module", [alerts.render, dashboards.build], ids=["rules", "dashboards"])
@pytest.mark.parametrize("option", OPTIONS)
def test_each_base_url_is_an_option_and_a_variable(module, option: str, monkeypatch, tmp_path) -> None:
    app = typer.Typer()
    app.command()(module.main)
    (tmp_path / "only").touch()

    def rendered(links: Links) -> dict[Path, str]:
        return {tmp_path / "only": getattr(links, option)}

    monkeypatch.setattr(module, "rendered", rendered)
    argument = "--" + option.replace("_", "-")
    for arguments, variables in (
        ([argument, "https://wiki.example/canary/"], {}),
        ([], {option.upper(): "https://wiki.example/canary"}),
    ):
        assert CliRunner().invoke(app, arguments, env=variables).exit_code == 0
        assert (tmp_path / "only").read_text("utf-8") == "https://wiki.example/canary"
        (tmp_path / "only").unlink()
    assert CliRunner().invoke(app, [argument, "wiki.example"]).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_label_that_alerts_lack_is_refused_in_the_services_url(tmp_path, monkeypatch) -> None:
    app = typer.Typer()
    app.command()(alerts.render.main)
    written: list[Links] = []
    monkeypatch.setattr(alerts.render, "rendered", lambda links: written.append(links) or {})
    refused = CliRunner().invoke(app, ["--service-url", "https://canary.example/{rank}"])
    assert (refused.exit_code, written) == (2, [])
    assert "{rank}" in refused.output
    assert CliRunner().invoke(app, ["--service-url", "https://{cluster}.example/{instance}"]).exit_code == 0
    assert written[0].service_in_rule() == "https://{{ $labels.cluster }}.example/{{ $labels.instance }}"
    assert (
        written[0].service_in_panel() == "https://${__data.fields.cluster}.example/${__data.fields.instance}"
    )


def test_every_alert_links_its_runbook_and_dashboard_below_their_bases() -> None:
    links = Links(runbook_base="https://wiki.example/runbooks", grafana_url="https://grafana.example")
    for text in alerts.render.rendered(links).values():
        names = re.findall(r"- alert: (\w+)", text)
        assert re.findall(r"runbook_url: \"(\S+)\"", text) == [
            f"https://wiki.example/runbooks/{name}.md" for name in names
        ]
        uids = re.findall(r"dashboard_url: \"https://grafana.example/d/([\w-]+)", text)
        assert len(uids) == len(names)
        assert set(uids) <= {board.uid for board in dashboards.build.BOARDS}
