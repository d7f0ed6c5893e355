"""Stores and loads on a GPU: the first of a canary's life waits for the device no more than later ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from canary_kernels import layout
from canary_obs.runtime.device.uploads import prepare_uploads, uploaded
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
    assert _found(rig) == (0, 0, 2 * SIZE)


@pytest.mark.parametrize("flipped", [0, 1])
def test_a_load_is_hashed_after_its_copy_which_nothing_else_waits_for(flipped: int) -> None:
    rig = make_rig(**QUIET)
    ask(rig)
    slots = cached_slots(rig)[: 4 * SIZE]
    source, destination = slots[: 2 * SIZE], slots[2 * SIZE :]
    folds = rig.canary.block_folds("full", source.view(-1, SIZE))
    assert folds is not None
    told = arrived(2, [[(k, v)] for _, k, v in folds.tolist()])
    kv = rig.engine.runner.pool.kv
    new = kv[:, :, source.to(kv.device)].clone()
    new[1, 0, 5] += flipped
    copying, copied = torch.Stream(kv.device), torch.Event(kv.device)
    places = destination.to(kv.device)
    torch.cuda.synchronize()
    with copying:
        torch.cuda._sleep(200_000_000)  # cycles, some 100 ms
        kv[:, :, places] = new
        copied.record()
    blocks = replace(blocks_of(rig, destination), expected=told, copied=[copied])
    with waits_refused():
        rig.canary.load_begun("a", "full", blocks)
    assert not copied.query(), "the copy is over before anything waits for it"
    torch.cuda.current_stream().synchronize()
    assert not copied.query(), "the engine's stream waits for the copy"
    copied.synchronize()
    with waits_refused():
        rig.canary.load_ended("a", "full", told)
    assert _found(rig) == (flipped, 0, 2 * SIZE)


def test_uploads_allocate_no_pinned_memory() -> None:
    """To allocate some may wait for the device, and what torch has is in use while copies are under way."""
    device = torch.device("cuda", torch.cuda.current_device())
    prepare_uploads(device)
    torch.cuda.synchronize()
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    torch.cuda._sleep(200_000_000)  # cycles, some 100 ms
    with waits_refused():
        found = [uploaded(torch.arange(size, dtype=torch.int64), device) for size in range(1, 400)]
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
    assert [part.tolist() for part in found] == [list(range(size)) for size in range(1, 400)]


def _found(rig: Any) -> tuple[int, int, int]:
    """KV_DATA and LOST_LOAD at HEAD, and slots of loads that were compared."""
    torch.cuda.synchronize()
    assert rig.canary.health.faults.total() == 0
    counters = rig.canary.state.by_name["full"].buffers.counters.tolist()
    lanes = (
        layout.lane(layout.Phase.HEAD, each) for each in (layout.Reason.KV_DATA, layout.Reason.LOST_LOAD)
    )
    found, lost = (counters[lane] for lane in lanes)
    return found, lost, counters[layout.COUNT_LOADS_COMPARED]
