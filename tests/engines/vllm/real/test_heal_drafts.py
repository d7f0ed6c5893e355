"""Healing of a real vLLM that speculates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from canary_obs.records import Tainted
from canary_obs.vocabulary import HealPolicy, Phase, Reason
from tests.engines.vllm.real.heals import counts, damage, finish, prompt, since
from tests.engines.vllm.real.rig import Rig

DRAFTS = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def rig(models: Any) -> Iterator[Rig]:
    made = Rig(models("llama"), num_gpu_blocks_override=120, speculative_config=DRAFTS)
    made.canary.patrol.enabled = False
    yield made
    made.close()


def test_who_writes_over_damage_with_drafts_has_not_read_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompt(2, 40)
    right = rig.generate([asked], tokens=8)
    rig.canary.healing.choose(HealPolicy.PROTECT)
    rig.fresh()
    told: list[Tainted] = []
    monkeypatch.setattr(rig.canary.taint, "send", lambda message: told.append(message) is None)
    rig.start({"1": prompt(1, 40)}, tokens=4)
    rig.step(2)
    block = rig.blocks_of("1")[1]  # not full: it is given to the next request
    rig.finish()
    before, answers = counts(rig), dict[str, list[int]]()
    damage(rig, block)
    rig.found.clear()
    rig.start({"2": asked}, tokens=8)
    rig.step()
    assert block in rig.blocks_of("2")
    finish(rig, answers)
    assert {(one.phase, one.reason) for one in rig.found} == {(Phase.HEAD, Reason.KV_DATA)}
    named = {one.request.rsplit("-", 1)[0] for message in told for one in message.requests}
    assert named == {"1"}
    assert {action for action, _ in since(rig, before)} <= {"evict"}
    assert [*answers.values()] == right


def test_without_damage_every_policy_answers_the_same_with_drafts(rig: Rig) -> None:
    asked, answers = [prompt(70 + number, 60 + number) for number in range(3)], {}
    for policy in HealPolicy:
        rig.canary.healing.choose(policy)
        rig.fresh()
        before = counts(rig)
        answers[policy] = rig.generate(asked, tokens=16)
        assert rig.canary.healing.status.effective is policy
        assert since(rig, before) == {}
    assert all(own == answers[HealPolicy.OFF] for own in answers.values())
