"""`canary-obs metrics`: the catalogue, complete, for people and for programs."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from canary_obs.cli import app
from canary_obs.errors import ConfigurationError
from canary_obs.telemetry.catalog import RANK_LABELS, all_metrics


def run(*arguments: str):
    return CliRunner().invoke(app, ["metrics", *arguments])


def test_json_has_every_metric_with_all_its_labels() -> None:
    rows = json.loads(run("--format", "json").stdout)
    assert [row["name"] for row in rows] == [metric.name for metric in all_metrics()]
    (violations,) = [row for row in rows if row["name"] == "kv_canary_violations_total"]
    assert violations == {
        "name": "kv_canary_violations_total", "kind": "counter", "unit": "",
        "labels": [*RANK_LABELS, "group", "phase", "reason"],
        "help": "Findings of failed checks, each where it was found first.",
    }  # fmt: skip


def test_markdown_has_one_row_per_metric() -> None:
    lines = run().stdout.splitlines()
    for metric in all_metrics():
        (row,) = [line for line in lines if line.startswith(f"| `{metric.name}` |")]
        assert metric.help in row


def test_another_format_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigurationError, match="Use md or json"):
        CliRunner().invoke(app, ["metrics", "--format", "xml"], catch_exceptions=False)
