"""Announced changes of slots are no violations; the same changes unannounced are."""

from __future__ import annotations

import pytest
import torch

from canary_kernels import layout
from canary_kernels.layout import RecordState
from canary_obs.vocabulary import Phase, Reason, State


@pytest.fixture
def rig(make_rig):
    made = make_rig(patrol_budget="off", idle_sweep=False)
    made.run(150)
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


def test_received_bytes_without_records_are_unverified(rig) -> None:
    slots = cached_slots(rig)[:4]
    rig.engine.runner.pool.kv[:, :, slots] += 1
    rig.canary.received("full", slots)
    assert state_of(rig, slots) == {RecordState.ADOPTED}
    assert counted(rig) == {}
    rig.canary.check_everything()
    final = rig.canary.detach()
    assert sum(final.groups["full"].unverified.values()) > 0
    assert final.groups["full"].violations[Phase.SWEEP][Reason.UNWRITTEN] == 0


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
