"""Slots numbered over several ranks: each rank hashes its own, and all ranks together hash every slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from canary_kernels.buffers import WHOLE, Sharding, allocate_buffers, source_from_tensor
from canary_kernels.checks import Backend, KernelArgumentError
from canary_kernels.fingerprint import (
    compare_slots,
    complete_slots,
    hash_slots,
    layer_plans,
    locate,
    plan_fingerprint,
)
from canary_kernels.layer_write import allocate_witness, check_layer, note_layer
from canary_kernels.layout import (
    COUNT_COMPLETED,
    COUNT_HASHED,
    COUNT_LAYER_CHECKED,
    COUNT_LAYER_LEFT_OUT,
    FINGERPRINT_K,
    IDENTITY,
    NUM_LANES,
    ROW_SLOT,
    Part,
    Phase,
    RealData,
    Reason,
    RecordState,
    identity_of,
    lane,
)
from tests.kernels.scenes import device_of

PAGES, PAGE = 3, 8
SHARES = [(2, 1), (2, 4), (4, 2), (3, 8)]  # ranks, interleave


def whole(device: str) -> dict[tuple[Part, int], torch.Tensor]:
    """By part and layer, a cache of all ranks [pages, ranks * PAGE, heads, bytes], to be cut for each."""
    draw = torch.Generator().manual_seed(3)
    keys = [(part, layer) for layer in range(2) for part in (Part.K, Part.V)]
    shape = PAGES, 4 * PAGE, 2, 24
    return {key: torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8).to(device) for key in keys}


def of_rank(cache, sharding: Sharding):
    """Sources of one rank's share of the first `ranks * PAGE` slots of each page, in memory of its own."""
    sources = []
    for (part, layer), tensor in cache.items():
        slots = torch.arange(sharding.ranks * PAGE)
        own = tensor[
            :, slots[slots // sharding.interleave % sharding.ranks == sharding.rank].to(tensor.device)
        ]
        sources.append(replace(source_from_tensor(own.contiguous(), part, layer), sharding=sharding))
    return sources


def of_all(cache, ranks: int):
    """Sources of the same slots in one memory."""
    kept = {key: tensor[:, : ranks * PAGE].contiguous() for key, tensor in cache.items()}
    return [source_from_tensor(tensor, *key) for key, tensor in kept.items()]


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize(("ranks", "interleave"), SHARES)
def test_a_rank_hashes_its_own_slots_and_nothing_of_others(backend, ranks, interleave):
    device = device_of(backend)
    cache, count = whole(device), PAGES * PAGE * ranks
    slots = torch.tensor([*range(count), -1, 3, count], device=device)
    together = hash_slots(backend, plan_fingerprint(of_all(cache, ranks), RealData.ALL, device), slots)
    total = torch.zeros_like(together)
    for rank in range(ranks):
        sharding = Sharding(ranks=ranks, rank=rank, interleave=interleave)
        plan = plan_fingerprint(of_rank(cache, sharding), RealData.ALL, device)
        assert plan.num_slots == count
        assert plan.bytes_per_slot * ranks == sum(source.slot_bytes for source in of_all(cache, ranks))
        hashes = hash_slots(backend, plan, slots)
        held = torch.tensor([0 <= slot < count and sharding.holds(slot) for slot in slots.tolist()])
        assert torch.equal(hashes[held], together[held])
        assert not hashes[~held].any()
        total += hashes
    assert torch.equal(total, together)


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("rank", [0, 1])
def test_what_another_rank_holds_is_neither_read_nor_found_wrong(backend, rank):
    device = device_of(backend)
    sharding = Sharding(ranks=2, rank=rank, interleave=4)
    sources = of_rank(whole(device), sharding)
    plan = plan_fingerprint(sources, RealData.ALL, device)
    buffers = allocate_buffers(PAGES * PAGE * 2, torch.ones(1, dtype=torch.int64, device=device))
    slots = torch.arange(16, 32, device=device)
    held = torch.tensor([sharding.holds(slot) for slot in slots.tolist()], device=device)
    for turn in range(2):  # again in the same slots: other bytes here, the same nothing of the other rank
        for slot in slots.tolist():
            buffers.records[slot, IDENTITY] = identity_of(turn, 1, RecordState.PENDING)
        complete_slots(backend, buffers, plan, slots)
        recorded = buffers.records[slots, FINGERPRINT_K:]
        assert recorded[held].all()
        assert not recorded[~held].any()
        compare_slots(backend, buffers, plan, slots, Phase.TAIL)
        assert not buffers.counters[:NUM_LANES].any()
        for source in sources:
            source.tensor.bitwise_xor_(1)
    assert buffers.counters[COUNT_COMPLETED] == buffers.counters[COUNT_HASHED + Phase.TAIL] == 32
    compare_slots(backend, buffers, plan, slots, Phase.TAIL)
    found = lane(Phase.TAIL, Reason.KV_DATA)
    assert buffers.counters[:NUM_LANES].sum() == buffers.counters[found] == 16
    seen = set(buffers.violations[found, :16, ROW_SLOT].tolist())
    assert seen == set(slots[held].tolist())


@pytest.mark.parametrize("backend", list(Backend))
def test_layers_are_looked_at_in_own_slots_alone(backend):
    device = device_of(backend)
    sharding = Sharding(ranks=2, rank=1, interleave=1)
    plan = plan_fingerprint(of_rank(whole(device), sharding), RealData.ALL, device)
    buffers = allocate_buffers(PAGES * PAGE * 2, torch.ones(1, dtype=torch.int64, device=device))
    witness = allocate_witness(torch.device(device))
    slots = torch.tensor([4, 5, 6, 7], device=device)
    for slot in slots.tolist():
        buffers.records[slot, IDENTITY] = identity_of(7, 1, RecordState.COMPLETE)
    layer = layer_plans(plan)[1]
    note_layer(backend, buffers, layer, witness, slots)
    for slot in slots.tolist():
        buffers.records[slot, IDENTITY] = identity_of(8, 2, RecordState.COMPLETE)
    check_layer(backend, buffers, layer, witness, slots)
    lost = lane(Phase.TAIL, Reason.LOST_WRITE)
    assert buffers.counters[:NUM_LANES].sum() == buffers.counters[lost] == 4  # K and V of 5 and 7
    assert set(buffers.violations[lost, :4, ROW_SLOT].tolist()) == {5, 7}
    assert (buffers.counters[COUNT_LAYER_CHECKED], buffers.counters[COUNT_LAYER_LEFT_OUT]) == (2, 2)


def test_a_changed_word_is_located_by_its_number_over_all_ranks():
    sharding = Sharding(ranks=4, rank=2, interleave=2)
    sources = of_rank(whole("cpu"), sharding)
    plan = plan_fingerprint(sources, RealData.ALL, "cpu")
    slot = next(slot for slot in range(70, 90) if sharding.holds(slot))
    listed = torch.tensor([slot])
    before = int(hash_slots(Backend.TORCH, plan, listed)[0, 0])
    page, within = divmod(sharding.local(slot), PAGE)
    sources[2].tensor[page, within, 1, 5] ^= 8
    after = int(hash_slots(Backend.TORCH, plan, listed)[0, 0])
    change = locate(plan, Part.K, slot, before, after)
    assert change is not None
    assert (change.layer, change.head, change.word) == (1, 1, 6 + 1)


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding(ranks=2, rank=2),
        Sharding(ranks=2, rank=-1),
        Sharding(ranks=2, interleave=3),
        Sharding(interleave=0),
    ],
)
def test_a_sharding_that_fits_no_page_is_refused(sharding):
    (source, *_) = of_all(whole("cpu"), 1)
    with pytest.raises(KernelArgumentError, match="rank < ranks, interleave dividing the page"):
        plan_fingerprint([replace(source, sharding=sharding)], RealData.ALL, "cpu")


def test_sources_of_one_group_share_a_sharding():
    cache = whole("cpu")
    first, second, *_ = of_rank(cache, Sharding(ranks=2))
    with pytest.raises(KernelArgumentError, match="one sharding for all sources"):
        plan_fingerprint([first, replace(second, sharding=WHOLE)], RealData.ALL, "cpu")
