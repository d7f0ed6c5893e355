"""A short soak of every kind of model: no false alarm, and the pressure is real."""

from __future__ import annotations

import pytest

from tests.soak.kinds import KINDS, PAIRS, soak
from tests.soak.totals import totals

SMALL = {"max_context": 256, "num_slots": 1024, "max_running": 8, "token_budget": 64}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_false_alarm(kind: str) -> None:
    found = soak(kind, 500_000, seed=2, sizes=SMALL)
    total = totals(found)
    print(found, f"{total['slot_checks']} checks, 95 % upper bound {total['upper_bound_95']:.1e}")
    assert len(found) == (2 if kind in PAIRS else 1)
    for one in found:
        assert (one.violations, one.observer_faults) == (0, 0)
        assert one.state == "ok"
        assert min(one.evictions, one.aborts, one.storm_aborts, one.sweep_passes, one.requests) > 0
        assert one.bytes_checked > 1000
        assert one.unverified == 0
