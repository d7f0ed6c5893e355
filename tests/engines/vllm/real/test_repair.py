"""A word of a real vLLM's KV is put back: its block stays cached, and who has not read it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from canary_obs.healing.guard_rail import Limits
from canary_obs.heals import Heal
from canary_obs.vocabulary import HealAction, HealOutcome, HealPolicy
from tests.engines.vllm.heal.endurance import references
from tests.engines.vllm.real.changed_words import SIZE, change_words, held, same
from tests.engines.vllm.real.heals import finish, prompt, release
from tests.engines.vllm.real.rig import Rig


@pytest.fixture(scope="module")
def rig(models: Any) -> Iterator[Rig]:
    made = Rig(models("llama"), max_num_batched_tokens=64, num_gpu_blocks_override=120)
    made.canary.healing.choose(HealPolicy.REPAIR)
    made.generate([prompt(99, 5)], tokens=2)  # what is cached from now on is known
    yield made
    made.close()


@pytest.fixture(autouse=True)
def heals(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Heal]]:
    """What is done, as it is reported; the patrol meets damage when a test asks for it."""
    sent: list[Heal] = []
    rig.fresh()
    rig.canary.healing._limits = Limits(1000, 0.9)
    rig.canary.healing.choose(HealPolicy.REPAIR)
    release(rig)
    rig.fresh()
    assert rig.canary.healing.status.effective is HealPolicy.REPAIR
    monkeypatch.setattr(rig.canary.patrol, "advance", lambda **_: ())
    monkeypatch.setattr(rig.canary.healing, "_send", sent.extend)
    yield sent
    rig.fresh()
    assert not rig.canary.health.faults


@pytest.mark.parametrize("slots", [(5,), (0, 5, 31)], ids=["one slot", "three slots"])
def test_an_idle_block_is_put_back_and_stays_cached(
    rig: Rig, heals: list[Heal], slots: tuple[int, ...]
) -> None:
    asked = prompt(1)
    right, cached = rig.generate([asked]), rig.idle_blocks()
    before = held(rig.canary, cached[2])
    change_words(rig.canary, cached[2], slots)
    rig.settle()
    assert same(before, held(rig.canary, cached[2]))
    rig.found.clear()
    assert rig.generate([asked]) == right
    assert rig.settle() == []
    # The fifth block was filled by forwards that read the third, since it was found intact last.
    assert set(cached[:4]) <= set(rig.idle_blocks())
    assert [(heal.action, heal.outcome, heal.blocks) for heal in heals] == [
        (HealAction.REPAIR, HealOutcome.DONE, 0),
        (HealAction.EVICT, HealOutcome.DONE, 1),
    ]
    assert heals[0].block == cached[2]
    assert all(
        f"slot {cached[2] * SIZE + slot}, part k, layer 1, word 0" in str(heals[0].detail) for slot in slots
    )


def test_a_block_in_use_is_put_back_and_who_has_sent_tokens_from_it_is_ended(
    rig: Rig, heals: list[Heal]
) -> None:
    asked = {"sent": prompt(7), "other": prompt(8)}
    right = rig.generate([asked["other"]], tokens=40)
    rig.fresh()
    answers: dict[str, list[int]] = {}
    rig.start(asked)
    rig.step(8)
    block = rig.blocks_of("sent")[1]
    before = held(rig.canary, block)
    change_words(rig.canary, block, (5,))
    rig.step()
    rig.settle()
    assert same(before, held(rig.canary, block))
    assert finish(rig, answers) == {"sent": "error", "other": "length"}
    assert [answers["other"]] == right
    assert block in rig.idle_blocks()
    done = {heal.action for heal in heals if heal.outcome is HealOutcome.DONE}
    assert {HealAction.REPAIR, HealAction.END} <= done
    assert set(references(rig)) == {0}


def test_two_words_of_a_slot_are_left_and_healed_as_under_protect(rig: Rig, heals: list[Heal]) -> None:
    rig.start({"sent": prompt(7), "other": prompt(8)})
    rig.step(8)
    block = rig.blocks_of("sent")[1]
    change_words(rig.canary, block, (5,), count=2)
    before = held(rig.canary, block)
    rig.settle()
    assert same(before, held(rig.canary, block))
    assert finish(rig) == {"sent": "error", "other": "length"}
    assert block not in rig.idle_blocks()
    refused = [heal for heal in heals if heal.outcome is HealOutcome.REFUSED]
    assert [(heal.action, heal.detail) for heal in refused] == [
        (HealAction.REPAIR, "no single word would explain it")
    ]
    assert set(references(rig)) == {0}
