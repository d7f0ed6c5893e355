"""One scheduler heals what any of two tensor-parallel ranks finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from canary_obs.healing.guard_rail import Limits
from canary_obs.vocabulary import HealPolicy
from tests.engines.vllm.heal.endurance import endure, references
from tests.engines.vllm.real.changed_words import same
from tests.engines.vllm.real.heals import finish, prompt
from tests.engines.vllm.real.ranks import RanksRig

WIDE = Limits(1000, 0.9)


@pytest.fixture(scope="module")
def rig(models: Any) -> Iterator[RanksRig]:
    made = RanksRig(models("llama"), max_num_batched_tokens=64, num_gpu_blocks_override=120)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def protected(rig: RanksRig) -> None:
    follow(rig, HealPolicy.PROTECT)


def follow(rig: RanksRig, policy: HealPolicy) -> None:
    rig.choose(policy, WIDE)
    rig.release()
    for seed in (90, 91, 92):  # the scheduler hears of it, answers, and hears every rank
        rig.generate([prompt(seed, 20)], tokens=1)
    assert rig.healing() == [(policy.value, None)] * 2
    rig.fresh()


def test_what_comes_from_the_schedulers_process_is_recognised_as_steady(rig: RanksRig) -> None:
    """Of twelve outputs one begins the request, and few give it a block."""
    rig.changes()
    rig.start({"alone": prompt(6)})
    rig.step(12)
    first, second = rig.changes()
    assert first == second
    assert first["NOTHING"] >= 8
    finish(rig)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_any_rank_finds_ends_who_has_sent_tokens_from_it(rig: RanksRig, rank: int) -> None:
    before = rig.counts()
    rig.start({"sent": prompt(7), "other": prompt(8)})
    rig.step(8)
    rig.damage(rank, rig.blocks_of("sent")[1])
    rig.settle()
    assert finish(rig) == {"sent": "error", "other": "length"}
    assert (rig.counts() - before)["end done"] == 1
    assert set(references(rig)) == {0}
    assert rig.faults() == [{}, {}]


def test_what_the_second_rank_finds_in_an_idle_block_is_not_read_again(rig: RanksRig) -> None:
    asked = prompt(1)
    right = rig.generate([asked])
    rig.damage(1, rig.idle_blocks()[2])
    rig.settle()
    before = rig.counts()
    rig.generate([prompt(2, 20)], tokens=2)
    assert (rig.counts() - before)["evict done"] >= 1
    assert rig.generate([asked]) == right


@pytest.mark.parametrize("rank", [0, 1])
def test_a_word_of_one_rank_is_put_back_there(rig: RanksRig, rank: int) -> None:
    follow(rig, HealPolicy.REPAIR)
    asked = prompt(1)
    right, cached = rig.generate([asked]), rig.idle_blocks()
    held, before = rig.held(cached[2]), rig.repairs()
    rig.change_words(rank, cached[2], (0, 5))
    rig.settle()
    assert all(map(same, held, rig.held(cached[2])))
    done = [now - own for now, own in zip(rig.repairs(), before, strict=True)]
    assert done[rank] == {"repair done": 1}
    assert not done[1 - rank]
    assert rig.generate([asked]) == right
    assert set(cached[:4]) <= set(rig.idle_blocks())
    assert rig.faults() == [{}, {}]


@pytest.mark.parametrize("rank", [0, 1])
def test_who_read_a_changed_word_of_one_rank_is_healed(rig: RanksRig, rank: int) -> None:
    follow(rig, HealPolicy.REPAIR)
    asked, answers = {"sent": prompt(7), "other": prompt(8)}, dict[str, list[int]]()
    right = rig.generate([asked["other"]], tokens=40)
    rig.fresh()
    rig.start(asked)
    rig.step(8)
    once, twice = rig.blocks_of("sent")[1:3]
    held, before = rig.held(once), rig.repairs()
    rig.change_words(rank, once, (5,))
    rig.change_words(rank, twice, (5,), count=2)
    rig.settle()
    assert all(map(same, held, rig.held(once)))
    assert finish(rig, answers) == {"sent": "error", "other": "length"}
    assert [answers["other"]] == right
    assert twice not in rig.idle_blocks()
    done = [now - own for now, own in zip(rig.repairs(), before, strict=True)]
    assert done[rank] == {"repair done": 1, "repair refused": 1}
    assert not done[1 - rank]
    assert set(references(rig)) == {0}
    assert rig.faults() == [{}, {}]


def test_repeated_actions_of_both_ranks_leave_no_reference_behind(rig: RanksRig) -> None:
    found = endure(rig, lambda actions: actions.total() >= 40)
    assert found["references_as_before"], found
    assert {action.rsplit(" ")[1] for action in found["actions"]} == {"done"}
    assert min(found["actions"][f"{action} done"] for action in ("evict", "recompute", "end")) > 0
    assert not found["observer_faults"]
