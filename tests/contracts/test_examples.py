"""Property tests judge what the code answers, not how fast the machine is."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def test_no_example_fails_because_the_machine_is_slow() -> None:
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
