"""A real Chromium on a console; skipped where it is not installed, except in CI."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
PHONE = {"width": 390, "height": 844}


@contextmanager
def chromium() -> Iterator[Any]:
    """A playwright browser."""
    program = shutil.which("chromium")
    if program is None:
        assert not os.environ.get("CANARY_CI"), "chromium must not be missing in CI"
        pytest.skip("chromium is NOT INSTALLED: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def axe_findings(page: Any, axe: Path) -> list[str]:
    """Serious and critical findings of axe-core on a page, with the elements."""
    page.evaluate(axe.read_text("utf-8"))  # by the debugger: the page's own policy stays as it is
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{rule['id']}: {node['target']} {node['failureSummary']}"
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
