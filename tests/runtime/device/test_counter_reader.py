"""What moved on the device stays known until its rows were read."""

from __future__ import annotations

import torch

from canary_kernels import layout
from canary_kernels.fingerprint import compare_slots
from canary_obs.runtime.device.byte_address import locate_byte
from tests.runtime.conftest import MakeRig, Rig


def damaged(make_rig: MakeRig) -> Rig:
    """A rig whose device has counted a violation that the host has not heard of."""
    rig = make_rig(patrol_budget="off", idle_sweep=False)
    rig.run(60)
    rig.canary.counter_reader.drain(rig.canary.step, 1.0)
    state = rig.canary.state
    group = state.groups[0]
    slots = torch.as_tensor(rig.engine.scheduler.live_slots()[:1])
    locate_byte(group.view.sources[0], int(slots[0]), 3).flip(1)
    compare_slots(state.backend, group.buffers, group.plan, slots, layout.Phase.SWEEP)
    assert rig.canary.counter_reader.violations == 0
    return rig


def test_a_copy_without_news_does_not_end_an_alarm(make_rig: MakeRig) -> None:
    rig = damaged(make_rig)
    reader, step = rig.canary.counter_reader, rig.canary.step
    for _ in range(3):
        reader.push(step)
        reader.fetch()
        reader.process(step)
        assert reader.alarmed
    found = reader.read_rows(step) or reader.read_rows(step)
    assert len(found) == reader.violations > 0
    assert not reader.alarmed


def test_a_copy_that_was_fetched_is_kept_until_it_is_processed(make_rig: MakeRig) -> None:
    """On a GPU several steps lie between the two, and a second fetch may find nothing."""
    rig = damaged(make_rig)
    reader, step = rig.canary.counter_reader, rig.canary.step
    reader.push(step)
    reader.fetch()
    reader.fetch()
    assert reader.busy
    reader.process(step)
    assert reader.violations > 0
    assert reader.alarmed
