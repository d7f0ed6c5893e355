"""A hub, and the variables that make it export to a receiver at once."""

from __future__ import annotations

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.hub.hub import Hub


@pytest.fixture
def hub():
    return Hub(ServiceConfig(snapshot_stale_seconds=600.0))


@pytest.fixture
def environ(monkeypatch):
    def set_variables(url: str, protocol: str, **more: str) -> None:
        quick = {"OTEL_BSP_SCHEDULE_DELAY": "10", "OTEL_BLRP_SCHEDULE_DELAY": "10"}
        named = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        for name, value in (quick | named | more).items():
            monkeypatch.setenv(name, value)

    return set_variables
