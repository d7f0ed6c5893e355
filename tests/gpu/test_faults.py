"""A fault of every reason, injected into an engine on the GPU, is counted under that reason only."""

from __future__ import annotations

import random

import pytest

from canary_kernels.layout import Reason
from tests.gpu.faults import FAULTS, FaultyRunner, counted, inject
from tests.gpu.rig import make_rig


@pytest.mark.parametrize("reason", FAULTS, ids=lambda reason: reason.name.lower())
def test_a_fault_is_counted_under_its_reason(reason: Reason) -> None:
    rig = make_rig(runner=FaultyRunner, patrol_budget="1GB/s", sweep_interval=20)
    rig.run(150)
    assert not any(counted(rig))
    draw = random.Random(reason)
    for _ in range(5):
        assert inject(rig, reason, draw) is not None
        after = counted(rig)
        rig.run(3)
        assert counted(rig) == after
    assert rig.canary.health.faults.total() == 0
    rig.canary.detach()
