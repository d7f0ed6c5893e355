"""A real Chromium on a console; skipped where it is not installed, except in CI."""

from __future__ import annotations

import os
import shutil
import time
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


class Effort:
    """Processor time that a page and this process, with its service, take inside the `with`.

    Not wall time: what else runs on the machine does not add to it.
    """

    def __init__(self, page: Any) -> None:
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.page_seconds = self.service_seconds = 0.0

    def _now(self) -> tuple[float, float]:
        metrics = {
            one["name"]: one["value"] for one in self._session.send("Performance.getMetrics")["metrics"]
        }
        return metrics["TaskDuration"], time.process_time()

    def __enter__(self) -> Effort:
        self._before = self._now()
        return self

    def __exit__(self, *error: object) -> None:
        page, service = self._now()
        self.page_seconds, self.service_seconds = page - self._before[0], service - self._before[1]

    @property
    def seconds(self) -> float:
        return self.page_seconds + self.service_seconds

    def __str__(self) -> str:
        return f"page {1e3 * self.page_seconds:.0f} ms, service {1e3 * self.service_seconds:.0f} ms"
