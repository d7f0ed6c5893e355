"""What a demo's plan means: when it is fulfilled, and the canary's settings."""

from __future__ import annotations

import time

import pytest

from canary_obs.config import IN_PROCESS
from canary_obs.demo.plan import DemoPlan, canary_config, canary_settings, service_of


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "SWEEP_INTERVAL", "CONFIG"):
        monkeypatch.delenv(f"KV_CANARY_{name}", raising=False)


@pytest.mark.parametrize(
    ("plan", "steps", "seconds", "fulfilled"),
    [
        (DemoPlan(), 10**6, 10**6, False),
        (DemoPlan(steps=10), 9, 10**6, False),
        (DemoPlan(steps=10), 10, 0, True),
        (DemoPlan(duration=5.0), 10**6, 0, False),
        (DemoPlan(duration=5.0), 0, 6, True),
        (DemoPlan(duration=5.0, steps=10), 10, 0, True),
    ],
)
def test_fulfilled_by_steps_or_seconds(plan: DemoPlan, steps: int, seconds: float, fulfilled: bool) -> None:
    assert plan.is_fulfilled(steps, time.monotonic() - seconds) is fulfilled


def test_defaults_of_the_demo() -> None:
    plan = DemoPlan(settings={"mode": "raise"})
    assert canary_settings(plan) == {"mode": "raise", "sweep_interval": 200, "endpoint": IN_PROCESS}
    config = canary_config(plan)
    assert (config.mode.value, config.sweep_interval, config.endpoint) == ("raise", 200, IN_PROCESS)


def test_the_environment_overrides_defaults_but_not_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CANARY_SWEEP_INTERVAL", "7")
    monkeypatch.setenv("KV_CANARY_ENDPOINT", "ipc:///tmp/environment.sock")
    config = canary_config(DemoPlan())
    assert (config.sweep_interval, config.endpoint) == (7, "ipc:///tmp/environment.sock")
    given = DemoPlan(settings={"endpoint": "ipc:///tmp/given.sock"})
    assert canary_config(given).endpoint == "ipc:///tmp/given.sock"


def test_with_a_service_the_canary_reports_to_it() -> None:
    assert "endpoint" not in canary_settings(DemoPlan(serve=True))


def test_no_service_unless_asked() -> None:
    plan = DemoPlan()
    with service_of(plan, canary_config(plan)) as service:
        assert service is None
