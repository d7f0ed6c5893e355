"""Healing of a real vLLM: damage is put into its own tensors, and what it answers is compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from canary_obs.engines.vllm.heal_actions import VllmActions
from canary_obs.errors import QuarantineRefused
from canary_obs.healing.guard_rail import Limits
from canary_obs.healing.quarantine import RepeatedDamage
from canary_obs.heals import Heal
from canary_obs.vocabulary import HealAction, HealOutcome, HealPolicy, Phase, Reason
from tests.engines.vllm.heal.endurance import endure, references
from tests.engines.vllm.real.heals import (
    counts,
    damage,
    finish,
    flood,
    preempt,
    prompt,
    read_another_block,
    release,
    reuse,
    since,
)
from tests.engines.vllm.real.rig import Rig


@pytest.fixture(scope="module")
def rig(models: Any) -> Iterator[Rig]:
    # Prompts come in chunks, and blocks are soon given to others.
    made = Rig(models("llama"), max_num_batched_tokens=64, num_gpu_blocks_override=120)
    made.canary.healing.choose(HealPolicy.EVICT)
    made.generate([prompt(99, 5)], tokens=2)  # what is cached from now on is known
    yield made
    made.close()


@pytest.fixture(autouse=True)
def clean(rig: Rig) -> Iterator[None]:
    rig.fresh()
    rig.canary.healing._limits = Limits(1000, 0.9)
    yield
    release(rig)
    rig.canary.healing.choose(HealPolicy.OFF)
    rig.generate([prompt(0, 5)], tokens=1)
    rig.fresh()


def test_a_damaged_idle_block_is_not_read_again(rig: Rig) -> None:
    asked = prompt(1)
    right = rig.generate([asked])
    before = counts(rig)
    rig.canary.healing.choose(HealPolicy.EVICT)
    damage(rig, rig.idle_blocks()[2])
    assert rig.generate([asked]) == right
    assert rig.canary.healing.status.effective is HealPolicy.EVICT, rig.canary.healing.status
    found = since(rig, before)
    assert found["evict", "done"] >= 1
    assert found["recompute", "done"] == 1  # it had the block before the first results told of it
    assert set(references(rig)) == {0}
    rig.found.clear()
    assert rig.generate([asked]) == right
    assert not rig.found


def test_what_was_computed_from_a_damaged_block_leaves_with_it(rig: Rig) -> None:
    rig.canary.healing.choose(HealPolicy.EVICT)
    rig.generate([prompt(4, 40)])  # the scheduler hears of the policy
    shared, before = prompt(1, 64), counts(rig)
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
    assert len(rig.idle_blocks()) == 1 + 1  # the first prompt's and the last one's
    assert since(rig, before) == {("evict", "done"): 1}


def test_a_running_request_whose_tokens_left_is_ended_with_an_error(rig: Rig) -> None:
    rig.canary.healing.choose(HealPolicy.PROTECT)
    rig.start({"sent": prompt(7), "other": prompt(8)})
    rig.step(8)
    damage(rig, rig.blocks_of("sent")[1])
    rig.settle()
    assert finish(rig) == {"sent": "error", "other": "length"}
    assert set(references(rig)) == {0}


@pytest.fixture
def without_patrol(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it may meet the damage sooner."""
    monkeypatch.setattr(rig.canary.patrol, "advance", lambda **_: None)


@pytest.mark.usefixtures("without_patrol")
def test_a_preempted_request_that_has_sent_what_it_read_is_ended(rig: Rig) -> None:
    rig.canary.healing.choose(HealPolicy.PROTECT)
    rig.start({"sent": prompt(16)})
    rig.step(8)
    damage(rig, rig.blocks_of("sent")[1])
    rig.step()
    preempt(rig, "sent")
    rig.settle()
    assert finish(rig) == {"sent": "error"}
    assert set(references(rig)) == {0}


@pytest.mark.usefixtures("without_patrol")
@pytest.mark.parametrize("met", ["later", "as it is written over"])
def test_who_has_sent_a_token_from_damage_is_ended_also_when_it_holds_the_block_no_more(
    rig: Rig, met: str
) -> None:
    rig.canary.healing.choose(HealPolicy.PROTECT)
    rig.start({"sent": prompt(16)}, tokens=120)
    rig.step(8)
    block = rig.blocks_of("sent")[1]
    damage(rig, block)
    rig.step()
    preempt(rig, "sent")
    assert rig.llm.reset_prefix_cache()  # it is computed again from its tokens: the wrong one is among them
    if met == "later":
        rig.settle()
    else:
        rig.start({f"other {number}": prompt(60 + number, 700) for number in range(8)}, tokens=2)
    reasons = finish(rig)
    assert reasons.pop("sent") == "error"
    phases = {one.phase for one in rig.found if one.slot // 32 == block}
    assert (Phase.HEAD in phases) == (met != "later")
    assert set(references(rig)) == {0}


def test_a_request_that_read_another_block_is_computed_again_and_answers_right(rig: Rig) -> None:
    own = {"a": prompt(9), "b": prompt(10)}
    right = rig.generate(list(own.values()), tokens=24)
    assert rig.llm.reset_prefix_cache()
    rig.canary.healing.choose(HealPolicy.PROTECT)
    before, answers = counts(rig), {}
    rig.start(own, tokens=24)
    rig.step(8)
    read_another_block(rig)
    reasons = finish(rig, answers)
    assert reasons == {"a": "length", "b": "length"}
    assert [answers["a"], answers["b"]] == right
    assert since(rig, before)["recompute", "done"] == 1
    assert set(references(rig)) == {0}


@pytest.mark.usefixtures("without_patrol")
def test_a_table_that_leads_to_what_healing_took_out_is_found(rig: Rig) -> None:
    """Its tokens are those that the request wants, and its bytes those that were computed: from damage."""
    asked, answers = prompt(17, 130), dict[str, list[int]]()
    rig.canary.healing.choose(HealPolicy.PROTECT)
    rig.generate([prompt(18, 5)], tokens=1)
    rig.start({"first": asked}, tokens=24)
    rig.step(6)
    first, _, third, *_ = rig.blocks_of("first")
    finish(rig, answers)
    damage(rig, first)
    rig.settle()
    rig.generate([prompt(19, 5)], tokens=1)
    assert third not in rig.idle_blocks()
    rig.start({"a": asked}, tokens=24)
    rig.step(6)
    assert third not in rig.blocks_of("a")
    rig.found.clear()
    table, _ = rig.block_table()
    table[rig.row_of("a"), 2] = third
    assert finish(rig, answers) == {"a": "length"}
    found = {(one.reason, one.slot // 32, one.request and one.request.split("-")[0]) for one in rig.found}
    assert (Reason.UNWRITTEN, third, "a") in found
    assert answers["a"] == answers["first"]
    assert set(references(rig)) == {0}


def test_a_slot_damaged_twice_leaves_circulation_and_comes_back(rig: Rig) -> None:
    rig.canary.healing.choose(HealPolicy.EVICT)
    rig.generate([prompt(11)])
    block = rig.idle_blocks()[1]
    for number in range(2):
        reuse(rig, block, 100 * number)
        damage(rig, block)
        rig.settle()
        rig.generate([prompt(12, 20)])
    rig.generate([prompt(13, 20)])
    assert ("full", block) in rig.canary.healing.status.quarantined
    assert references(rig)[block - 1] == 1
    assert rig.llm.reset_prefix_cache()
    assert references(rig)[block - 1] == 1
    release(rig)
    assert rig.canary.healing.status.quarantined == ()
    assert set(references(rig)) == {0}


def test_quarantine_leaves_room_for_the_longest_request(rig: Rig) -> None:
    actions, out = VllmActions(rig.core.scheduler), range(1, 88)  # of 119 blocks
    for number in out:
        actions.quarantine((0, number))
    for again in range(2):
        with pytest.raises(QuarantineRefused, match=r"31 blocks .* max_model_len=1024 needs 32"):
            actions.quarantine((0, 88 + again))
    assert len(rig.generate([prompt(15, 1000)])[0]) == 16
    for number in out:
        actions.release((0, number))
    assert set(references(rig)) == {0}
    actions.quarantine((0, 88))  # there is room again
    actions.release((0, 88))


def test_a_flood_of_false_findings_empties_no_cache_and_ends_few_requests(rig: Rig) -> None:
    """Every slot in use, step after step; what is said once the limit is reached is only said."""
    actions, share = 6, 0.25
    rig.canary.healing._limits = Limits(actions, share)
    rig.canary.healing.choose(HealPolicy.PROTECT)
    rig.generate([prompt(20 + number, 64) for number in range(20)], tokens=2)
    names, held = {f"f{number}": prompt(50 + number % 4, 100) for number in range(8)}, len(rig.idle_blocks())
    heals, reasons = flood(rig, names)
    done = [heal for heal in heals if heal.outcome is HealOutcome.DONE]
    ended = sum(heal.action is HealAction.END for heal in done)
    assert 0 < len(done) <= actions
    assert list(reasons.values()).count("error") == ended < actions
    assert list(reasons.values()).count("length") == len(names) - ended
    assert sum(heal.blocks for heal in done) <= share * rig.canary.healing.status.pool_blocks
    assert len(rig.idle_blocks()) > held / 2
    outcomes = {heal.outcome for heal in heals}
    assert outcomes == {HealOutcome.DONE, HealOutcome.LIMITED, HealOutcome.WOULD}
    status = rig.canary.healing.status
    assert (status.policy, status.effective) == (HealPolicy.PROTECT, HealPolicy.DRY_RUN)
    assert "heal_actions_per_minute" in str(status.why) or "heal_pool_share" in str(status.why)
    assert any("healing is a dry run, not protect" in why for why in rig.canary.verdict()[1])
    assert not rig.canary.health.faults
    release(rig)
    assert set(references(rig)) == {0}


def test_repeated_actions_leave_no_reference_behind(rig: Rig) -> None:
    """A short form of `tests.engines.vllm.heal.endurance`, on an engine that has blocks to spare."""
    rounds: list[dict[str, Any]] = []
    found = endure(rig, lambda actions: actions.total() >= 40, report=rounds.append)
    assert found["references_as_before"], found
    assert len(rounds) == found["events"]["rounds"]
    assert found["stuck"] == []
    assert set(references(rig)) == {0}
    assert {action.rsplit(" ")[1] for action in found["actions"]} == {"done"}
    assert min(found["actions"][f"{action} done"] for action in ("evict", "recompute", "end")) > 0
    assert not found["observer_faults"]


def test_a_round_that_is_late_ends_at_once_and_leaves_no_reference_behind(rig: Rig) -> None:
    calls = itertools.count()
    found = endure(rig, lambda _: False, late=lambda: next(calls) > 4)
    assert (found["events"]["rounds"], found["events"]["rounds_cut_short"]) == (1, 1)
    assert found["references_as_before"], found
    assert not rig.core.scheduler.running


def test_requests_that_stand_still_are_told(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = rig.llm.llm_engine, itertools.count()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: [] if 30 <= next(calls) < 530 else step())
    found = endure(rig, lambda _: False)
    assert found["events"]["rounds"] == 1
    assert any(" RUNNING: " in one for one in found["stuck"]), found
    assert found["references_as_before"], found


@pytest.mark.parametrize("harm", ["used", "idle", "young", "table"])
def test_a_dry_run_says_what_protect_then_does(rig: Rig, harm: str) -> None:
    said, done = (heals_of(rig, policy, harm) for policy in (HealPolicy.DRY_RUN, HealPolicy.PROTECT))
    assert said == done
    assert said


def heals_of(rig: Rig, policy: HealPolicy, harm: str) -> list[tuple[str, str | None, int]]:
    """Action, request and evicted blocks, of what is done about one harm."""
    outcome = HealOutcome.WOULD if policy is HealPolicy.DRY_RUN else HealOutcome.DONE
    found: list[Heal] = []
    rig.canary.healing.choose(policy)
    rig.fresh()
    rig.generate([prompt(30, 40)], tokens=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.canary.healing, "_send", found.extend)
        # Damaged once by each policy, the same block may be damaged for the second time with the second one.
        patch.setattr(RepeatedDamage, "again", lambda *_: False)
        rig.start({"a": prompt(31), "b": prompt(32)})
        rig.step(2 if harm == "young" else 8)
        if harm == "table":
            read_another_block(rig)
        else:
            damage(rig, rig.idle_blocks()[0] if harm == "idle" else rig.blocks_of("a")[1])
            rig.settle()
        rig.step(2)  # the first one's results bring it to the scheduler, the second one its answer
    rig.llm.llm_engine.abort_request(["a", "b"])
    rig.fresh()
    assert {heal.outcome for heal in found} == {outcome}
    return sorted(
        (heal.action.value, heal.request and heal.request.rsplit("-", 1)[0], heal.blocks) for heal in found
    )


@pytest.mark.parametrize("policy", sorted(HealPolicy))
def test_without_damage_every_policy_answers_the_same(rig: Rig, policy: HealPolicy) -> None:
    asked = [prompt(40 + number % 5, 60 + 20 * number) for number in range(8)]
    rig.canary.healing.choose(HealPolicy.OFF)
    right, before = rig.generate(asked), counts(rig)
    rig.fresh()
    rig.canary.healing.choose(policy)
    assert [rig.generate(asked) for _ in range(2)] == [right, right]
    assert since(rig, before) == {}
    assert not rig.found
