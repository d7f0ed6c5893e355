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
from canary_obs.telemetry.metric_docs import Format, render

METRICS = Path(__file__).parents[2] / "docs/metrics.md"
RUNBOOK_BASE = os.environ.get("RUNBOOK_BASE", alerts.render.RUNBOOK_BASE)
RENDERED = {
    "rules": partial(alerts.render.rendered, RUNBOOK_BASE),
    "rule tests": alerts.tests.build.rendered,
    "dashboards": partial(dashboards.build.rendered, RUNBOOK_BASE),
    "manifests": dashboards.manifests.rendered,
}


@pytest.mark.parametrize("kind", RENDERED)
def test_generated_files_are_current(kind) -> None:
    files = RENDERED[kind]()
    assert files
    for path, text in files.items():
        assert path.read_text("utf-8") == text, f"{path} is out of date: run make ops-files"
    folders = {path.parent for path in files}
    suffix = next(iter(files)).suffix
    if kind != "manifests":  # their folder also has manifests written by hand
        assert {path for folder in folders for path in folder.glob(f"*{suffix}")} == set(files)


def test_the_metrics_page_is_current() -> None:
    assert METRICS.read_text("utf-8") == render(Format.MD) + "\n", "run make ops-files"


@pytest.mark.parametrize("module", [alerts.render, dashboards.build], ids=["rules", "dashboards"])
def test_the_runbook_base_is_an_option_and_a_variable(module, monkeypatch, tmp_path) -> None:
    app = typer.Typer()
    app.command()(module.main)
    files = {tmp_path / path.name: path for path in module.rendered()}

    def rendered(runbook_base: str) -> dict[Path, str]:
        return {copy: f"{path.name} {runbook_base}" for copy, path in files.items()}

    monkeypatch.setattr(module, "rendered", rendered)
    for arguments, variables in (
        (["--runbook-base", "https://wiki.example/runbooks/"], {}),
        ([], {"RUNBOOK_BASE": "https://wiki.example/runbooks"}),
    ):
        assert CliRunner().invoke(app, arguments, env=variables).exit_code == 0
        for copy, path in files.items():
            assert copy.read_text("utf-8") == f"{path.name} https://wiki.example/runbooks"
            copy.unlink()
    refused = CliRunner().invoke(app, ["--runbook-base", "wiki.example"])
    assert (refused.exit_code, list(tmp_path.iterdir())) == (2, [])


def test_every_alert_links_its_runbook_below_the_base() -> None:
    for text in alerts.render.rendered("https://wiki.example/runbooks").values():
        names = re.findall(r"- alert: (\w+)", text)
        assert re.findall(r"runbook_url: (\S+)", text) == [
            f"https://wiki.example/runbooks/{name}.md" for name in names
        ]
