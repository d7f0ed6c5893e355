"""Fixtures shared by the tests of a module; skipped where Prometheus is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from canary_obs.engines.toolkit.service_process import free_port
from tests.e2e.conftest import System
from tests.ops.browser import chromium
from tests.ops.console_fleet import ConsoleFleet
from tests.ops.monitoring_stack import MonitoringStack, require_monitoring
from tests.ops.tools import judge


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    built = System(tmp_path_factory.mktemp("system"), free_port(), token="ops-token")
    yield built
    built.close()


@pytest.fixture(scope="module")
def stack(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MonitoringStack]:
    require_monitoring()
    folder = tmp_path_factory.mktemp("stack")
    built = MonitoringStack(folder, free_port(), free_port(), system.port, system.token)
    try:
        built.lay_out()
        built.start()
        yield built
    finally:
        built.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[ConsoleFleet]:
    del browser  # first: without one the service is not needed
    built = ConsoleFleet(tmp_path_factory.mktemp("console"))
    yield built
    built.service.close()


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axe") / "check"
    shutil.copytree(Path(__file__).parent / "axe", folder)
    judge("npm", "ci", "--ignore-scripts", cwd=folder)
    return folder / "node_modules/axe-core/axe.min.js"


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that may raise no error and break no Content-Security-Policy."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if "Content Security" in line.text else None)
    yield page
    context.close()
    assert errors == []
