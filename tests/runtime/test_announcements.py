"""Announced changes of slots are no violations; the same changes unannounced are."""

from __future__ import annotations

import pytest
import torch

from canary_kernels import layout
from canary_kernels.layout import RecordState
from canary_obs.runtime.report.snapshot import group_counters
from canary_obs.vocabulary import Cause, Phase, Reason, State


@pytest.fixture
def rig(make_rig):
    made = make_rig(patrol_budget="off", idle_sweep=False)
    made.run(60)
    made.finish_requests()
    return made


def cached_slots(rig) -> torch.Tensor:
    return rig.canary._adapter.prefix_cache.cached("full", unlocked_only=False).slots


def free_slots(rig, count: int) -> torch.Tensor:
    held = set(rig.canary._adapter.slots_in_use("full").tolist())
    found = [slot for slot in range(rig.engine.config.num_slots) if slot not in held][:count]
    assert len(found) == count
    return torch.tensor(found)


def state_of(rig, slots: torch.Tensor) -> set[int]:
    identity = rig.canary.state.groups[0].buffers.records[slots, layout.IDENTITY]
    return set(((identity >> 32) & layout.STATE_MASK).tolist())


def counted(rig) -> dict[Reason, int]:
    rig.canary.patrol.whole_cycle()
    rig.canary.reporter.send_violations(rig.canary.counter_reader.drain(rig.canary.step, 1.0))
    values = rig.canary.counter_reader.sample.values
    lanes = layout.Phase.PATROL * layout.NUM_REASONS
    return {
        reason: int(values[lanes + index]) for index, reason in enumerate(Reason) if values[lanes + index]
    }


def copy_bytes(rig, source: torch.Tensor, destination: torch.Tensor) -> None:
    kv = rig.engine.runner.pool.kv
    kv[:, :, destination] = kv[:, :, source]


def test_an_announced_copy_carries_its_records(rig) -> None:
    source, destination = cached_slots(rig)[:5], free_slots(rig, 5)
    copy_bytes(rig, source, destination)
    rig.canary.copied("full", source, destination)
    records = rig.canary.state.groups[0].buffers.records
    assert torch.equal(records[source], records[destination])
    assert counted(rig) == {}


def test_an_unannounced_copy_is_a_violation(rig) -> None:
    source, destination = cached_slots(rig)[:1], cached_slots(rig)[5:6]
    copy_bytes(rig, source, destination)
    assert counted(rig) == {Reason.KV_DATA: 2}  # K and V


def test_received_bytes_without_records_get_a_baseline_on_arrival(rig) -> None:
    slots = cached_slots(rig)[:4]
    rig.engine.runner.pool.kv[:, :, slots] += 1
    rig.canary.received("full", slots)
    assert state_of(rig, slots) == {RecordState.BASELINE}
    assert counted(rig) == {}
    rig.canary.check_everything()
    counters = group_counters(rig.canary.state, rig.canary.counter_reader)["full"]
    assert counters.unverified[Cause.BASELINE] == 4, "their links are not known to be right"
    assert counters.unverified[Cause.ADOPTED] == 0
    assert counters.violations[Phase.SWEEP][Reason.UNWRITTEN] == 0
    rig.engine.runner.pool.kv[0, 0, slots[2], 0, 0] += 1
    assert counted(rig) == {Reason.KV_DATA: 1}, "damage after the arrival is seen"


def test_without_coverage_received_bytes_stay_adopted(make_rig) -> None:
    rig = make_rig(patrol_budget="off", idle_sweep=False, real_data="none")
    rig.run(20)
    slots = cached_slots(rig)[:4]
    rig.canary.received("full", slots)
    assert state_of(rig, slots) == {RecordState.ADOPTED}


def test_bytes_that_are_awaited_are_compared_with_nothing_until_they_arrive(rig) -> None:
    slots, kv = cached_slots(rig)[:3], rig.engine.runner.pool.kv
    rig.canary.awaited("full", slots)
    kv[:, :, slots] += 1
    assert counted(rig) == {}
    assert state_of(rig, slots) == {RecordState.AWAITED}
    kv[:, :, slots] += 1  # they come late, and not all at once
    rig.canary.received("full", slots)
    assert state_of(rig, slots) == {RecordState.BASELINE}
    assert counted(rig) == {}


def test_a_second_arrival_in_one_step_replaces_the_first_baseline(rig) -> None:
    slots, kv = cached_slots(rig)[:3], rig.engine.runner.pool.kv
    for _ in range(2):
        kv[:, :, slots] += 1
        rig.canary.received("full", slots)
    assert counted(rig) == {}


def test_two_damaged_arrivals_in_one_step_both_leave_a_row(rig) -> None:
    """A log row is written once per tick of the clock: each arrival has a tick of its own."""
    slots, kv = cached_slots(rig)[:3], rig.engine.runner.pool.kv
    rig.canary.reporter.send_violations = (rows := []).extend
    clocks = [rig.canary.state.now]
    for number in range(3):
        records = rig.canary.records_of("full", slots[number : number + 1])
        kv[0, 0, slots[number], 0, 0] += 1
        rig.canary.received("full", slots[number : number + 1], records)
        clocks.append(rig.canary.state.now)
    rig.canary.delivery.drain(1.0)
    assert {row.slot for row in rows} == set(slots.tolist())
    assert len(set(clocks)) == len(clocks)


def test_a_record_of_a_sender_without_a_fingerprint_gets_a_baseline(rig) -> None:
    slots = cached_slots(rig)[:2]
    group = rig.canary.state.groups[0]
    group.adopt(slots)
    rig.canary.received("full", slots, rig.canary.records_of("full", slots))
    assert state_of(rig, slots) == {RecordState.BASELINE}
    assert counted(rig) == {}


def test_a_baseline_that_is_overwritten_is_no_witness_of_a_lost_write(rig) -> None:
    """Its token is not known: the same token may rightly write the same bytes."""
    rig.canary.received("full", torch.arange(rig.engine.config.num_slots))
    rig.run(50)
    rig.canary.check_everything()
    assert rig.canary.counter_reader.violations == 0


def test_invalidated_slots_have_no_record_and_their_use_is_a_violation(rig) -> None:
    slots = cached_slots(rig)
    rig.canary.invalidated("full", slots[:3])
    assert state_of(rig, slots[:3]) == {RecordState.EMPTY}
    assert counted(rig) == {}
    rig.canary.check_everything()
    final = rig.canary.detach()
    assert final.groups["full"].violations[Phase.SWEEP][Reason.UNWRITTEN] == 3
    assert final.state is State.VIOLATED


def test_an_announcement_of_an_unknown_group_is_a_fault_of_the_observer_only(rig) -> None:
    rig.canary.copied("nope", torch.tensor([0]), torch.tensor([1]))
    assert rig.canary.verdict()[0] is State.BLIND
    assert rig.canary.health.faults["announce"] == 1


def test_a_copy_from_nowhere_stores_no_garbage(rig) -> None:
    """A record of any skipped slot would accuse bytes that nobody wrote."""
    group, destination = rig.canary.state.groups[0], free_slots(rig, 3)
    group.store(torch.tensor([-1]), group.records_of(cached_slots(rig)[:1]))  # a skipped slot leaves a record
    source = cached_slots(rig)[:3].clone()
    source[1] = -1
    copy_bytes(rig, source[[0, 2]], destination[[0, 2]])
    rig.canary.copied("full", source, destination)
    assert state_of(rig, destination[[0, 2]]) == {RecordState.COMPLETE}
    assert state_of(rig, destination[1:2]) == {RecordState.ADOPTED}
    assert counted(rig) == {}


def test_records_of_no_slot_are_unverified_at_their_receiver(rig) -> None:
    group, destination = rig.canary.state.groups[0], free_slots(rig, 2)
    group.store(torch.tensor([-1]), group.records_of(cached_slots(rig)[:1]))
    sent = rig.canary.records_of("full", torch.tensor([-1, group.view.num_slots]))
    rig.canary.received("full", destination, sent)
    assert counted(rig) == {}
    assert state_of(rig, destination) <= {RecordState.ADOPTED, RecordState.BASELINE}
