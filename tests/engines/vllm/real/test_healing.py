"""Healing of a real vLLM: damage is put into its own tensors, and what it answers is compared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from canary_obs.vocabulary import HealPolicy
from tests.engines.vllm.real.rig import Rig


@pytest.fixture(scope="module")
def rig(models: Any) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KV_CANARY_HEAL_ACTIONS_PER_MINUTE", "1000")
        made = Rig(models("llama"), max_num_batched_tokens=64)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def clean(rig: Rig) -> Iterator[None]:
    rig.fresh()
    yield
    rig.canary.healing.choose(HealPolicy.OFF)
    rig.fresh()


def prompt(seed: int, length: int = 150) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, 1024) for _ in range(length)]


def damage(rig: Rig, block: int) -> None:
    """Large enough to change what is answered."""
    for layer in range(3):
        rig.layer_cache(0, layer)[block].mul_(-3.0).add_(1.0)


def references(rig: Rig) -> list[int]:
    return [block.ref_cnt for block in rig.core.scheduler.kv_cache_manager.block_pool.blocks[1:]]


def counts(rig: Rig) -> dict[tuple[str, str], int]:
    return {
        (action.value, outcome.value): number
        for action, of in rig.canary.healing.counts.items()
        for outcome, number in of.items()
        if number
    }


def test_a_damaged_idle_block_is_not_read_again(rig: Rig) -> None:
    asked = prompt(1)
    right = rig.generate([asked])
    rig.canary.healing.choose(HealPolicy.EVICT)
    damage(rig, rig.idle_blocks()[2])
    assert rig.generate([asked]) == right
    assert rig.canary.healing.status.effective is HealPolicy.EVICT, rig.canary.healing.status
    found = counts(rig)
    assert found["evict", "done"] >= 1
    assert found["recompute", "done"] == 1  # it had the block before the first results told of it
    assert set(references(rig)) == {0}
    rig.found.clear()
    assert rig.generate([asked]) == right
    assert not rig.found


def test_what_was_computed_from_a_damaged_block_leaves_with_it(rig: Rig) -> None:
    rig.canary.healing.choose(HealPolicy.EVICT)
    rig.generate([prompt(4, 40)])  # the scheduler hears of the policy
    shared = prompt(1, 64)
    rig.start({"one": shared + prompt(2, 60)}, tokens=4)
    rig.step(3)
    root = rig.blocks_of("one")[0]
    rig.finish()
    rig.generate([shared + prompt(3, 60)], tokens=4)
    others = rig.idle_blocks()
    assert len(others) == 1 + 3 + 1  # the first prompt's, one's, and what the third has of its own
    damage(rig, root)
    rig.settle()
    rig.generate([prompt(6, 20)])
    assert len(rig.idle_blocks()) == 1
    assert counts(rig) == {("evict", "done"): 1}


def test_a_running_request_whose_tokens_left_is_ended_with_an_error(rig: Rig) -> None:
    rig.canary.healing.choose(HealPolicy.PROTECT)
    rig.start({"sent": prompt(7), "other": prompt(8)})
    rig.step(8)
    damage(rig, rig.blocks_of("sent")[1])
    rig.settle()
    reasons = finish(rig)
    print(reasons, counts(rig))
    assert reasons["sent"] == "error"
    assert reasons["other"] == "length"
    assert set(references(rig)) == {0}


def finish(rig: Rig) -> dict[str, str]:
    reasons = {}
    engine = rig.llm.llm_engine
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                reasons[output.request_id] = output.outputs[0].finish_reason
    return reasons
