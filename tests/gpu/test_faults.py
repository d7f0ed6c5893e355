"""Every reason's fault, planted in an engine on the GPU, is counted under that reason and ends with it."""

from __future__ import annotations

import random

import pytest

from canary_kernels.layout import Reason
from tests.gpu.faults import PLANTERS, FaultyRunner, counted, plant
from tests.gpu.rig import make_rig


@pytest.mark.parametrize("reason", PLANTERS, ids=lambda reason: reason.name.lower())
def test_a_fault_is_counted_under_its_reason(reason: Reason) -> None:
    rig = make_rig(runner=FaultyRunner, patrol_budget="1GB/s", sweep_interval=20)
    rig.run(150)
    assert not any(counted(rig))
    draw = random.Random(reason)
    for _ in range(5):
        assert plant(rig, reason, draw) is not None
        after = counted(rig)
        rig.run(3)
        assert counted(rig) == after
    assert rig.canary.health.faults.total() == 0
    rig.canary.detach()
