"""What is generated is committed and current; `make ops-files` rewrites it."""

from __future__ import annotations

from pathlib import Path

import pytest

import alerts.render
import alerts.tests.build
import dashboards.build
import dashboards.manifests
from canary_obs.telemetry.metric_docs import Format, render

METRICS = Path(__file__).parents[2] / "docs/metrics.md"
SOURCES = {
    "rules": alerts.render,
    "rule tests": alerts.tests.build,
    "dashboards": dashboards.build,
    "manifests": dashboards.manifests,
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_generated_files_are_current(source) -> None:
    files = source.rendered()
    assert files
    for path, text in files.items():
        assert path.read_text("utf-8") == text, f"{path} is out of date: run make ops-files"
    folders = {path.parent for path in files}
    suffix = next(iter(files)).suffix
    if source is not dashboards.manifests:  # its folder has manifests written by hand as well
        assert {path for folder in folders for path in folder.glob(f"*{suffix}")} == set(files)


def test_the_metrics_page_is_current() -> None:
    assert METRICS.read_text("utf-8") == render(Format.MD) + "\n", "run make ops-files"
