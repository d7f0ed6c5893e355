"""Stores and loads on a GPU: the first of a canary's life waits for the device no more than later ones."""

from __future__ import annotations

import torch

from canary_kernels import layout
from tests.gpu.rig import make_rig, waits_refused
from tests.gpu.test_hits import QUIET, ask
from tests.runtime.test_announcements import cached_slots
from tests.runtime.test_loads import SIZE, arrived, blocks_of


def test_the_first_store_and_load_wait_for_nothing() -> None:
    rig = make_rig(**QUIET)
    ask(rig)
    slots = cached_slots(rig)[: 4 * SIZE]
    source, destination = slots[: 2 * SIZE], slots[2 * SIZE :]
    torch.cuda.synchronize()
    with waits_refused():
        folds = rig.canary.block_folds("full", source.view(-1, SIZE))
    assert folds is not None
    sent = [[(k, v)] for whole, k, v in folds.tolist() if whole]
    assert len(sent) == 2
    each = range(1), range(1, 2)
    rig.canary.block_folds("full", source.view(-1, SIZE), shares=each)  # compiles
    with waits_refused():
        shares = rig.canary.block_folds("full", source.view(-1, SIZE), shares=each)
    assert shares is not None
    assert torch.equal(shares[:, :, 1:].sum(0), folds[:, 1:])
    with waits_refused():
        rig.canary.load_begun("a", "full", blocks_of(rig, destination))
    kv = rig.engine.runner.pool.kv
    kv[:, :, destination.to(kv.device)] = kv[:, :, source.to(kv.device)]
    with waits_refused():
        rig.canary.load_ended("a", "full", arrived(2, sent))
    torch.cuda.synchronize()
    counters = rig.canary.state.by_name["full"].buffers.counters
    assert int(counters[layout.lane(layout.Phase.HEAD, layout.Reason.KV_DATA)]) == 0
    assert int(counters[layout.lane(layout.Phase.HEAD, layout.Reason.LOST_LOAD)]) == 0
    assert rig.canary.health.faults.total() == 0
