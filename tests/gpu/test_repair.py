"""On a GPU, under load: one changed word is put back where it lies, and two are left."""

from __future__ import annotations

import pytest
import torch

from canary_kernels import layout
from canary_obs.errors import RepairRefused
from canary_obs.runtime.device.byte_address import locate_byte, read_slot
from canary_obs.runtime.device.state import Group
from canary_obs.runtime.repair import repair_block
from canary_obs.vocabulary import HealAction, HealOutcome, HealPolicy, SlotState
from tests.gpu.rig import Rig, make_rig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def complete(group: Group) -> list[int]:
    state = group.buffers.records[:, layout.IDENTITY] >> 32 & layout.STATE_MASK
    found: list[int] = (state == SlotState.COMPLETE.code).nonzero().flatten().tolist()
    return found


def content(group: Group, slot: int) -> list[torch.Tensor]:
    return [read_slot(source, slot) for source in group.view.sources]


def change(group: Group, slot: int, words: int) -> None:
    for byte in range(4 * words):
        locate_byte(group.view.sources[-1], slot, byte).flip(0x5A)


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def test_one_word_is_put_back_and_two_are_left() -> None:
    rig = make_rig(patrol_budget="1B/s")
    rig.run(100)
    group = rig.canary.state.groups[0]
    for slot in complete(group)[:50]:
        before, alone = content(group, slot), range(slot, slot + 1)
        change(group, slot, 1)
        repair_block(group, alone)
        assert same(content(group, slot), before)
        change(group, slot, 2)
        damaged = content(group, slot)
        with pytest.raises(RepairRefused, match="no single word"):
            repair_block(group, alone)
        assert same(content(group, slot), damaged)
        change(group, slot, 2)
    rig.canary.check_everything()
    assert rig.canary.verdict()[0].value == "ok"


def test_damage_under_load_is_put_back_between_steps() -> None:
    many = {"heal_actions_per_minute": 1000, "heal_pool_share": 1.0}
    rig: Rig = make_rig(heal=HealPolicy.REPAIR, patrol_budget="20%", **many)
    rig.run(100)
    group, done = rig.canary.state.groups[0], 0
    for _ in range(20):
        torch.cuda.synchronize()
        change(group, complete(group)[-1], 1)
        rig.run(40)
        done = rig.canary.healing.counts[HealAction.REPAIR][HealOutcome.DONE]
    assert done > 0
    assert not rig.canary.health.faults
    assert rig.canary.healing.status.effective is HealPolicy.REPAIR
