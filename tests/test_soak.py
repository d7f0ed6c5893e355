"""A short soak of every kind of model: no false alarm, and the pressure is real."""

from __future__ import annotations

import pytest

from canary_obs.engines.reference.settings import MODELS
from tests.soak import report, soak

SMALL = {"max_context": 256, "num_slots": 1024, "max_running": 8, "token_budget": 64}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_no_false_alarm(model: str) -> None:
    found = soak(model, 500_000, seed=2, sizes=SMALL)
    total = report([found])
    print(found, f"{total['slot_checks']} checks, 95 % upper bound {total['upper_bound_95']:.1e}")
    assert (found.violations, found.observer_faults) == (0, 0)
    assert found.state == "ok"
    assert min(found.evictions, found.aborts, found.storms, found.sweep_passes) > 0
    assert found.bytes_checked > 1000
