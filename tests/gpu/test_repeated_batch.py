"""Batches that repeat are launched from what was kept of them: they check the same as the first time."""

from __future__ import annotations

import torch

from canary_kernels import layout
from tests.gpu.rig import make_rig


def test_steps_of_one_batch_find_what_is_damaged_between_them() -> None:
    rig = make_rig(engine={"max_running": 4})
    rig.run(40)
    canary = rig.canary
    group = canary.state.groups[0]
    steps = canary.forwards.checked[group.name]
    kept = [key for key in group.buffers.cache if isinstance(key, tuple) and callable(key[0])]
    assert kept, "no launch was kept: nothing here would be tested"
    torch.cuda.synchronize()
    written = torch.nonzero(group.buffers.records[:, layout.IDENTITY]).flatten()
    group.buffers.records[written, layout.CHAIN] ^= 1
    rig.run(steps + 4 - canary.forwards.checked[group.name] + 4)
    canary.check_everything()
    canary.delivery.drain(5.0)
    assert canary.counter_reader.violations > 0
