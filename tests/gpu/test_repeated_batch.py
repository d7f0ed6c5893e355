"""A batch that repeats is launched from what was kept of it: it checks the same as the first time."""

from __future__ import annotations

import torch

from canary_kernels import layout
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import compare_slots
from canary_kernels.layout import Phase
from canary_kernels.verify import verify_rows
from tests.gpu.rig import make_rig

CALLS = 3


def test_a_kept_launch_checks_what_the_first_one_did() -> None:
    rig = make_rig()
    rig.run(40)
    group = rig.canary.state.groups[0]
    buffers, batch = group.buffers, group.batches._batch
    assert batch is not None
    slots = batch.out_slots

    def added() -> list[list[int]]:
        """Of each of some calls: counters that moved, the log's lanes first."""
        found = []
        for _ in range(CALLS):
            torch.cuda.synchronize()
            before = buffers.counters.clone()
            verify_rows(Backend.TRITON, buffers, batch, Phase.HEAD)
            compare_slots(Backend.TRITON, buffers, group.plan, slots, Phase.HEAD)
            torch.cuda.synchronize()
            found.append((buffers.counters - before).tolist())
        return found

    clean = added()
    assert batch.cache[Phase.HEAD][0] == (buffers,)
    assert buffers.cache[compare_slots, Phase.HEAD, False][0] == (group.plan, slots)
    assert clean == [clean[0]] * CALLS
    assert clean[0][layout.COUNT_VERIFIED + Phase.HEAD] > 0
    assert not any(clean[0][: layout.NUM_LANES])

    buffers.records[:, layout.CHAIN] ^= 1
    damaged = added()
    assert all(any(counts[: layout.NUM_LANES]) for counts in damaged)
