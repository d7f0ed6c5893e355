"""Slots of all ranks, from vLLM's table and the mapping of one rank; vLLM's own: real/test_sharded.py."""

from __future__ import annotations

import pytest
import torch

from canary_kernels.buffers import Sharding
from canary_obs.engine_api.views import GroupStep
from tests.engines.vllm.sharded_mapping import local_mapping, make_batch, sharded_slots, shown

SHARES = [(2, 1), (2, 16), (4, 2), (8, 1)]
BLOCK = 16


@pytest.mark.parametrize(("ranks", "interleave"), SHARES)
def test_each_rank_shows_the_slots_of_all_tokens(ranks: int, interleave: int) -> None:
    for rank in range(ranks):
        sharding = Sharding(ranks=ranks, rank=rank, interleave=interleave)
        slots = sharded_slots(BLOCK, sharding)
        for seed in range(4):  # the same memory again
            batch = make_batch(BLOCK, ranks, seed)
            assert shown(slots, batch, local_mapping(batch, sharding)) == batch.slots


def test_a_token_of_this_rank_is_shown_where_vllm_writes_it() -> None:
    sharding = Sharding(ranks=2, rank=1, interleave=1)
    batch = make_batch(BLOCK, 2, 5)
    mapping = local_mapping(batch, sharding)
    own = (mapping >= 0).nonzero().flatten().tolist()
    mapping[own[3]], mapping[own[7]] = mapping[own[3]] + 1, -1
    found = shown(sharded_slots(BLOCK, sharding), batch, mapping)
    pairs = enumerate(zip(found, batch.slots, strict=True))
    wrong = {at: slot for at, (slot, right) in pairs if slot != right}
    assert wrong == {own[3]: batch.slots[own[3]] + 2, own[7]: -1}
    # What it writes for a token of the other rank is none of that token's bytes.
    others = [at for at in range(len(batch.slots)) if at not in own]
    mapping = local_mapping(batch, sharding)
    mapping[others[0]] = 40
    assert shown(sharded_slots(BLOCK, sharding), batch, mapping) == batch.slots


def test_positions_beyond_the_table_are_no_error() -> None:
    sharding = Sharding(ranks=2, rank=0, interleave=1)
    batch = make_batch(BLOCK, 2, 6)
    batch.positions[-1], batch.positions[0] = 1 << 40, -5
    assert len(shown(sharded_slots(BLOCK, sharding), batch, local_mapping(batch, sharding))) == len(
        batch.slots
    )


def test_padding_after_the_last_request_is_no_error() -> None:
    sharding = Sharding(ranks=2, rank=0, interleave=1)
    batch = make_batch(BLOCK, 2, 7)
    mapping = local_mapping(batch, sharding)
    batch.starts[-1] -= 1
    assert shown(sharded_slots(BLOCK, sharding), batch, mapping)[:-1] == batch.slots[:-1]


def test_a_batch_that_repeats_is_shown_as_the_same_one_without_new_memory() -> None:
    sharding = Sharding(ranks=2, rank=0, interleave=1)
    slots, batch = sharded_slots(BLOCK, sharding), make_batch(BLOCK, 2, 8)
    own = {"full": GroupStep(slot_table=batch.table, out_slots=local_mapping(batch, sharding))}
    first = slots.steps(own, batch.positions, batch.starts)
    assert slots.steps(own, batch.positions, batch.starts) is first
    again = {"full": GroupStep(slot_table=batch.table, out_slots=own["full"].out_slots)}
    second = slots.steps(again, batch.positions, batch.starts)
    assert second["full"].out_slots.data_ptr() == first["full"].out_slots.data_ptr()


def test_groups_that_are_whole_are_shown_as_they_are() -> None:
    sharding = Sharding(ranks=2, rank=1, interleave=1)
    batch = make_batch(BLOCK, 2, 8)
    whole = GroupStep(slot_table=torch.zeros(1, 1), out_slots=torch.zeros(1))
    full = GroupStep(slot_table=batch.table, out_slots=local_mapping(batch, sharding))
    own = {"full": full, "whole": whole}
    found = sharded_slots(BLOCK, sharding).steps(own, batch.positions, batch.starts)
    assert found["whole"] is whole
    assert found["full"] is not full
