"""Fixtures shared by the tests of a module; skipped where Prometheus is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from canary_obs.engines.toolkit.service_process import free_port
from tests.e2e.conftest import System
from tests.ops.monitoring_stack import MonitoringStack, require_monitoring


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
