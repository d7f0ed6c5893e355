"""What ranks whose results vLLM does not take bring to its scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from canary_obs.engines.vllm.heal_link import DAMAGE_ATTRIBUTE, HealLink
from canary_obs.engines.vllm.heal_ranks import RANKS_ATTRIBUTE, RankDamages
from canary_obs.healing.damage import Damage
from canary_obs.healing.guard_rail import Limits
from canary_obs.healing.messages import DamageMessage, HealsMessage
from canary_obs.heals import HealStatus
from canary_obs.vocabulary import HealPolicy, Reason

LIMITS = Limits(10, 0.5)


def damage(slot: int) -> Damage:
    return Damage(0, slot // 4, slot, slot % 4, Reason.KV_DATA, "full")


def output(*slots: int) -> Any:
    message = DamageMessage(HealPolicy.PROTECT, LIMITS, 1, tuple(map(damage, slots)))
    return SimpleNamespace(**({DAMAGE_ATTRIBUTE: message} if slots else {}))


def test_the_output_of_one_rank_brings_what_the_others_found() -> None:
    outputs = [own := output(4), output(), output(8, 12), output(16)]
    found = RankDamages(None).aggregate(outputs, output_rank=0)
    assert getattr(found, RANKS_ATTRIBUTE) == (damage(8), damage(12), damage(16))
    assert getattr(found, DAMAGE_ATTRIBUTE).damages == (damage(4),)
    assert not hasattr(own, RANKS_ATTRIBUTE)  # vLLM may share it
    assert outputs[0] is found  # for an aggregator that comes after


def test_without_damage_the_output_is_vllms_own() -> None:
    outputs = [output(4), output()]
    assert RankDamages(None).aggregate(outputs) is outputs[0]
    assert RankDamages(None).aggregate([None, output(4)]) is None


def test_an_aggregator_that_vllm_has_goes_first() -> None:
    own = SimpleNamespace(aggregate=lambda outputs, output_rank: SimpleNamespace(of=outputs, at=output_rank))
    outputs = [output(), output(4)]
    found = RankDamages(own).aggregate(outputs, output_rank=0)
    assert (found.of, found.at) == (outputs, 0)
    assert getattr(found, RANKS_ATTRIBUTE) == (damage(4),)


def test_a_rank_keeps_what_it_found_until_its_results_are_taken() -> None:
    forwards: Any = SimpleNamespace(number=3)
    link, result = HealLink({}, forwards, SimpleNamespace(rank=1), torch.device("cpu")), object()
    link.choose(HealPolicy.PROTECT, LIMITS)
    link._outbox.add(damage(4))
    assert link._around_results(lambda: result)() is result
    assert link._outbox.due
    for policy in (HealPolicy.EVICT, HealPolicy.PROTECT):
        status = HealStatus(policy=policy, effective=policy)
        link.note(SimpleNamespace(kv_canary_heals=HealsMessage((), status)), None)
        assert link._heard == (policy is HealPolicy.PROTECT)
    link.choose(HealPolicy.EVICT, LIMITS)
    assert not link._heard
