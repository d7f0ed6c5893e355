"""Records split for several receivers or joined from several senders equal those of the whole slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from canary_kernels import layout
from canary_kernels.layout import RecordState
from canary_obs.reference_engine.cache.connector import FULL_SLOTS
from canary_obs.runtime.transfer import join_records
from canary_obs.vocabulary import Cause, Phase, Reason, State

WORDS = st.integers(-(2**63), 2**63 - 1)


@pytest.fixture
def rig(make_rig):
    made = make_rig(patrol_budget="off", idle_sweep=False)
    made.run(100)
    made.finish_requests()
    return made


def cached(rig, count: int) -> torch.Tensor:
    return rig.canary._adapter.prefix_cache.cached("full", unlocked_only=False).slots[:count]


def record(position: int, state: RecordState, *words: int) -> list[int]:
    return [layout.identity_of(7, position, state, words[0]), *words]


@given(st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=4))
@settings(max_examples=50)
def test_fingerprints_of_agreeing_senders_are_summed(senders: list[tuple[int, int, int]]) -> None:
    chain = senders[0][0]
    shares = torch.tensor([[record(3, RecordState.COMPLETE, chain, k, v)] for _, k, v in senders])
    (whole,) = join_records(shares).tolist()
    assert whole[:2] == record(3, RecordState.COMPLETE, chain)
    assert whole[2] == layout.signed(sum(k for _, k, _ in senders))
    assert whole[3] == layout.signed(sum(v for _, _, v in senders))


@pytest.mark.parametrize(
    "other",
    [
        record(4, RecordState.COMPLETE, 1, 5, 6),
        record(3, RecordState.COMPLETE, 2, 5, 6),
        record(3, RecordState.ADOPTED, 1, 5, 6),
    ],
    ids=["position", "chain", "state"],
)
def test_records_of_disagreeing_senders_are_empty(other: list[int]) -> None:
    sound, mine = record(9, RecordState.COMPLETE, 8, 1, 1), record(3, RecordState.COMPLETE, 1, 5, 6)
    whole = join_records(torch.tensor([[sound, mine], [sound, other]]))
    assert whole[1].tolist() == [0, 0, 0, 0]
    assert whole[0].tolist() == record(9, RecordState.COMPLETE, 8, 2, 2)


def test_pending_records_are_empty() -> None:
    states = [RecordState.PENDING, RecordState.ADOPTED, RecordState.EMPTY]
    whole = join_records(torch.tensor([record(3, state, 1, 5, 6) for state in states]))
    assert [(row[0] >> 32) & layout.STATE_MASK for row in whole.tolist()] == [
        RecordState.EMPTY, RecordState.ADOPTED, RecordState.EMPTY,
    ]  # fmt: skip


def test_shares_sum_to_the_whole_and_locate_damage_by_heads(rig) -> None:
    slots = cached(rig, 6)
    shares = rig.canary.records_of("full", slots, (range(1), range(1, 2)))
    assert shares.shape == (2, 6, layout.RECORD_WORDS)
    whole = rig.canary.records_of("full", slots)
    assert torch.equal(join_records(shares), whole)
    kv = rig.engine.runner.pool.kv
    kv[:, :, slots[0], 1] += 1  # the second head: its share is what the record leaves over
    again = rig.canary.records_of("full", slots, (range(1), range(1, 2)))
    assert torch.equal(again, shares)
    kv[:, :, slots[0], 0] += 1
    changed = rig.canary.records_of("full", slots, (range(1), range(1, 2)))
    assert not torch.equal(changed[0, 0], shares[0, 0])
    assert torch.equal(join_records(changed), whole)


def test_folds_of_shares_sum_to_the_whole_and_locate_damage_by_heads(rig) -> None:
    blocks = cached(rig, 6).view(2, 3).clone()
    blocks[1, 2] = -1
    each = range(1), range(1, 2)
    whole, shares = (
        rig.canary.block_folds("full", blocks),
        rig.canary.block_folds("full", blocks, shares=each),
    )
    assert shares.shape == (2, 2, 3)
    assert torch.equal(shares[:, :, 1:].sum(0), whole[:, 1:])
    assert shares[:, :, 0].tolist() == [[1, 1]] * 2
    assert torch.equal(rig.canary.block_folds("full", blocks, shares=(range(2),))[0], whole)
    # As a receiver takes it, from records of its own heads alone.
    group = rig.canary.state.groups[0]
    records = group.buffers.records.clone()
    own = rig.canary.records_of("full", blocks.flatten()[:5], each)
    for number in range(2):
        group.buffers.records[blocks.flatten()[:5]] = own[number]
        assert torch.equal(rig.canary.block_folds("full", blocks), shares[number])
    group.buffers.records.copy_(records)
    kv = rig.engine.runner.pool.kv
    kv[:, :, blocks[0, 0], 1] += 1  # the second head: its share is what the record leaves over
    assert torch.equal(rig.canary.block_folds("full", blocks, shares=each), shares)
    kv[:, :, blocks[0, 0], 0] += 1
    changed = rig.canary.block_folds("full", blocks, shares=each)
    assert not torch.equal(changed[0, 0], shares[0, 0])
    assert torch.equal(changed[:, :, 1:].sum(0), whole[:, 1:])


def test_shares_of_heads_held_elsewhere_are_a_fault_of_the_observer_only(rig) -> None:
    assert rig.canary.records_of("full", cached(rig, 2), (range(1, 3), range(3, 4))) is None
    assert rig.canary.records_of("nope", cached(rig, 2)) is None
    assert rig.canary.health.faults["announce"] == 2
    assert rig.canary.verdict()[0] is State.BLIND
    assert rig.canary.record_format("nope") is None


def test_formats_differ_with_what_is_hashed(make_rig) -> None:
    formats = [
        make_rig(engine=engine, real_data=coverage).canary.record_format("full")
        for coverage in ("all", "partial")
        for engine in ({}, {"page_size": 16}, {"dtype": torch.float64})
    ]
    every, paged, wide, some, *_ = formats
    assert every == paged
    assert len({every, wide, some}) == 3


def test_records_that_arrive_are_compared_and_kept(rig) -> None:
    slots = cached(rig, 4)
    records = rig.canary.records_of("full", slots)
    rig.engine.runner.pool.kv[0, 0, slots[1], 0, 0] += 1
    rig.canary.received("full", slots, records, "prefill-1")
    rig.canary.reporter.send_violations = (rows := []).extend
    rig.canary.delivery.drain(1.0)
    assert {(row.phase, row.reason, row.slot, row.peer) for row in rows} == {
        (Phase.HEAD, Reason.KV_DATA, int(slots[1]), "prefill-1")
    }
    rig.engine.runner.pool.kv[0, 0, slots[2], 0, 0] += 1
    rig.canary.check_everything()
    assert {row.slot: row.peer for row in rows} == {int(slots[1]): "prefill-1", int(slots[2]): None}
    final = rig.canary.detach()
    assert final.groups["full"].unverified.get(Cause.ADOPTED, 0) == 0


def test_an_unfinished_record_that_arrives_is_unwritten(rig) -> None:
    slots = cached(rig, 3)
    records = rig.canary.records_of("full", slots)
    records[1, layout.IDENTITY] ^= layout.PENDING_TO_COMPLETE
    rig.canary.received("full", slots, records)
    rig.canary.check_everything()
    final = rig.canary.detach()
    assert final.groups["full"].violations[Phase.SWEEP][Reason.UNWRITTEN] == 1


def test_without_protection_nothing_is_sent(make_rig) -> None:
    rig = make_rig()
    rig.canary.detach()
    assert rig.canary.records_of("full", torch.tensor([1])) is None
    assert rig.canary.record_format("full") is None


def test_what_was_in_a_slot_is_compared_before_a_transfer_is_awaited_in_it(rig) -> None:
    """A slot that nobody holds any more is compared by nothing else before its record is gone."""
    held = set(rig.canary._adapter.slots_in_use("full").tolist())
    records = rig.canary.state.groups[0].buffers.records
    states = (records[:, layout.IDENTITY] >> 32) & layout.STATE_MASK
    complete = (states == int(RecordState.COMPLETE)).nonzero()[:, 0].tolist()
    slots = [slot for slot in complete if slot not in held]
    rig.engine.runner.pool.kv[1, 0, slots[0]] += 1
    rig.engine.connector.reserved(FULL_SLOTS, torch.tensor(slots[:3]))
    rig.canary.check_everything()
    found = rig.canary.detach().groups["full"]
    assert found.violations[Phase.HEAD][Reason.KV_DATA] == 1
    assert not records[slots[:3]].any()
