"""What healing does about damage, and what keeps it from doing more."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, strategies as st

from canary_obs.healing.damage import Damage
from canary_obs.healing.guard_rail import SECONDS, GuardRail, Limits
from canary_obs.healing.healer import Healer
from canary_obs.healing.lineage import Lineage
from canary_obs.heals import Heal
from canary_obs.vocabulary import HealAction, HealOutcome, HealPolicy, Reason
from tests.healing.cache import KEY_TOKENS, Cache

WIDE = Limits(1000, 1.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(cache: Cache, policy: HealPolicy, limits: Limits = WIDE, clock: Clock | None = None) -> Healer:
    lineage = Lineage(lambda key: key in cache.cached.values())
    for request in cache.running.values():
        lineage.follow(request.keys, len(request.keys))
    healer = Healer(cache, lineage, limits, clock or Clock())
    healer.choose(policy)
    return healer


def bytes_of(block: int, **more: object) -> Damage:
    damage = Damage(0, block, block * KEY_TOKENS, 0, Reason.KV_DATA, "full", found=9)
    return damage._replace(**more)  # type: ignore[arg-type]


def misread(request: str, position: int, good: int | None = None) -> Damage:
    return bytes_of(0, reason=Reason.CHAIN, request=request, position=position, good=good)


def shared() -> Cache:
    """`a` and `b` share their first block; `c` shares nothing."""
    cache = Cache()
    cache.add("a", range(12), [1, 2, 3], sent=5)
    cache.add("b", [*range(4), 50, 51, 52, 53], [1, 4])
    cache.add("c", range(60, 68), [5, 6], sent=1)
    return cache


def said(heals: tuple[Heal, ...]) -> Counter[tuple[HealAction, HealOutcome]]:
    return Counter((heal.action, heal.outcome) for heal in heals)


def test_evict_takes_all_that_was_computed_from_it_and_starts_what_has_sent_nothing_again() -> None:
    cache = shared()
    healer = made(cache, HealPolicy.EVICT)
    healer.heal([bytes_of(1)])
    assert set(cache.cached) == {5, 6}
    assert (cache.again, cache.ended, cache.barred) == (["b"], [], {"a"})
    heals = healer.drain()
    assert said(heals) == {
        (HealAction.EVICT, HealOutcome.DONE): 1, (HealAction.RECOMPUTE, HealOutcome.DONE): 1,
    }  # fmt: skip
    assert heals[0].blocks == 4
    assert (heals[1].request, heals[1].tokens) == ("b", 8)


def test_protect_ends_what_has_sent_tokens_and_spares_the_rest() -> None:
    cache = shared()
    made(cache, HealPolicy.PROTECT).heal([bytes_of(1)])
    assert (cache.again, cache.ended) == (["b"], ["a"])
    assert list(cache.running) == ["c"]


def abandoned(healer: Healer) -> set[int]:
    report = healer.report()
    assert report is not None
    return {block for _, block in report.abandoned}


def test_blocks_that_nobody_caches_or_holds_any_more_are_said_once() -> None:
    cache = shared()
    healer = made(cache, HealPolicy.PROTECT)
    healer.heal([bytes_of(1)])
    assert abandoned(healer) == {1, 2, 3, 4}
    healer.heal([bytes_of(6)])
    assert abandoned(healer) == {6}  # 5 stays in the cache
    cache = shared()
    healer = made(cache, HealPolicy.EVICT)
    healer.heal([bytes_of(1)])
    assert abandoned(healer) == {4}  # `a` goes on with the others
    cache = shared()
    healer = made(cache, HealPolicy.DRY_RUN)
    healer.heal([bytes_of(1)])
    assert abandoned(healer) == set()


def test_tokens_of_forwards_that_are_known_to_be_good_do_not_end_a_request() -> None:
    cache = shared()
    cache.given_out = 7
    made(cache, HealPolicy.PROTECT).heal([bytes_of(1, good=7)])
    assert (set(cache.again), cache.ended) == ({"a", "b"}, [])
    cache = shared()
    cache.given_out = 8  # the tokens of forward 8 have left
    made(cache, HealPolicy.PROTECT).heal([bytes_of(1, good=7)])
    assert (cache.again, cache.ended) == (["b"], ["a"])


def test_a_request_that_read_something_else_costs_only_itself_and_what_went_on_from_it() -> None:
    cache = shared()
    made(cache, HealPolicy.PROTECT).heal([misread("a", 5)])
    assert cache.ended == ["a"]
    assert set(cache.cached) == {1, 4, 5, 6}  # the block before that position is right


def test_what_a_request_computed_is_found_after_it_has_ended() -> None:
    cache = shared()
    healer = made(cache, HealPolicy.EVICT)
    cache.finished["a"] = cache.running.pop("a").keys
    healer.heal([misread("a", 4)])
    assert set(cache.cached) == {1, 4, 5, 6}


def test_a_damaged_record_costs_the_block_and_no_request() -> None:
    cache = shared()
    made(cache, HealPolicy.PROTECT).heal([bytes_of(1, kv_intact=True)])
    assert 1 not in cache.cached
    assert not cache.again + cache.ended


def test_a_request_is_not_computed_again_for_ever() -> None:
    cache = shared()
    cache.running["b"].restarts = 3
    made(cache, HealPolicy.PROTECT).heal([bytes_of(4)])
    assert (cache.again, cache.ended) == ([], ["b"])


def test_what_was_written_over_since_harms_nobody() -> None:
    cache = shared()
    cache.cached.clear()
    c = cache.running["c"]
    c.computed = 5  # of its second block one token was there before this forward
    made(cache, HealPolicy.PROTECT).heal([bytes_of(6, offset=1)])
    assert not cache.again + cache.ended
    c.since = 10  # it began after the damage was found, and computed the block itself
    made(cache, HealPolicy.PROTECT).heal([bytes_of(6, offset=0)])
    assert not cache.again + cache.ended
    c.joined = 8  # it got the block from the cache
    made(cache, HealPolicy.PROTECT).heal([bytes_of(6, offset=1)])
    assert cache.ended == ["c"]


def test_copies_elsewhere_and_blocks_from_before_make_it_unverified() -> None:
    cache = shared()
    cache.copies_elsewhere = "OffloadingConnector"
    healer = made(cache, HealPolicy.EVICT)
    cache.add("d", range(80, 84), [9])
    healer._lineage.older = frozenset(cache.keys_of((0, 5)))
    healer.heal([bytes_of(6), bytes_of(9), bytes_of(5)])
    details = [heal.detail or "" for heal in healer.drain() if heal.action is HealAction.EVICT]
    assert ["OffloadingConnector" in detail for detail in details] == [True] * 3
    assert ["before healing began" in detail for detail in details] == [False, True, True]


DAMAGES = st.lists(
    st.one_of(
        st.builds(bytes_of, st.integers(1, 12), good=st.one_of(st.none(), st.integers(0, 9))),
        st.builds(misread, st.sampled_from("abcde"), st.integers(0, 11), st.one_of(st.none(), st.just(7))),
    ),
    max_size=12,
)
TOKENS = st.lists(st.integers(0, 1), min_size=KEY_TOKENS, max_size=3 * KEY_TOKENS)


def busy(prompts: list[list[int]]) -> Cache:
    """Requests that share blocks where they share whole blocks of tokens."""
    cache = Cache(given_out=7)
    for name, tokens in zip("abcde", prompts, strict=False):
        whole = tokens[: len(tokens) // KEY_TOKENS * KEY_TOKENS]
        blocks = []
        for end in range(KEY_TOKENS, len(whole) + 1, KEY_TOKENS):
            known = [block for _, block in cache.blocks_of(bytes(whole[:end]))]
            free = max([0, *cache.cached, *blocks]) + 1
            blocks.append(known[0] if known else free)
        cache.add(name, whole, blocks, sent=len(tokens) % 3)
    return cache


@given(st.lists(TOKENS, min_size=1, max_size=5), DAMAGES)
def test_a_dry_run_predicts_what_is_done(prompts: list[list[int]], damages: list[Damage]) -> None:
    for damage in damages:
        dry, real = busy(prompts), busy(prompts)
        predicting, doing = made(dry, HealPolicy.DRY_RUN), made(real, HealPolicy.PROTECT)
        predicting.heal([damage])
        doing.heal([damage])
        assert dry.cached == busy(prompts).cached
        assert not dry.again + dry.ended
        would = [(heal.action, heal.request, heal.blocks) for heal in predicting.drain()]
        assert would == [(heal.action, heal.request, heal.blocks) for heal in doing.drain()]


@given(st.lists(TOKENS, min_size=1, max_size=5), DAMAGES)
def test_after_protect_nobody_holds_what_was_computed_from_damage(
    prompts: list[list[int]], damages: list[Damage]
) -> None:
    cache = busy(prompts)
    healer = made(cache, HealPolicy.PROTECT)
    for damage in damages:
        tainted: set[bytes] = set()
        if damage.request is None:
            tainted = set(cache.keys_of((0, damage.block)))
        elif damage.request in cache.running:
            tainted = set(cache.running[damage.request].keys[damage.position // KEY_TOKENS :])
        healer.heal([damage])
        assert damage.request not in cache.running
        for key in tainted:
            assert not [held for held in cache.cached.values() if held.startswith(key)]
            assert not [each for each in cache.running.values() if key in each.keys]


def test_a_flood_of_findings_stops_at_the_limit() -> None:
    cache, clock = Cache(pool=100), Clock()
    for number in range(50):
        cache.add(f"r{number}", [number] * 8, [2 * number + 1, 2 * number + 2], sent=1)
    healer = made(cache, HealPolicy.PROTECT, Limits(20, 0.5), clock)
    healer.heal([bytes_of(2 * number + 1) for number in range(50)])
    assert len(cache.ended) == 10  # each costs two actions: its blocks, and the request
    assert len(cache.cached) == 80
    assert healer.effective is HealPolicy.DRY_RUN
    assert "20 actions" in str(healer.why)
    found = said(healer.drain())
    assert found[HealAction.END, HealOutcome.DONE] == 10
    assert found[HealAction.END, HealOutcome.LIMITED] == 1
    assert found[HealAction.END, HealOutcome.WOULD] == 39
    clock.now = 3600.0
    healer.heal([bytes_of(99)])
    assert len(cache.ended) == 10  # until an operator chooses anew
    healer.choose(HealPolicy.PROTECT)
    healer.heal([bytes_of(99)])
    assert len(cache.ended) == 11


def test_a_tree_larger_than_the_share_of_the_pool_stays() -> None:
    cache = Cache(pool=10)
    cache.add("a", range(12), [1, 2, 3])
    healer = made(cache, HealPolicy.EVICT, Limits(100, 0.2))
    healer.heal([bytes_of(1)])
    assert len(cache.cached) == 3
    assert "3 of 10 blocks" in str(healer.why)


def test_a_choice_brings_its_own_limits() -> None:
    cache = shared()
    healer = made(cache, HealPolicy.PROTECT, Limits(0, 1.0))
    healer.heal([bytes_of(6)])
    assert healer.why
    healer.choose(HealPolicy.PROTECT, limits=Limits(10, 1.0))
    healer.heal([bytes_of(6)])
    assert cache.ended == ["c"]


def test_limits_are_of_one_minute() -> None:
    cache, clock = Cache(pool=100), Clock()
    for number in range(6):
        cache.add(f"r{number}", [number] * 4, [number + 1], sent=1)
    healer = made(cache, HealPolicy.EVICT, Limits(1, 1.0), clock)
    for number in range(6):
        healer.heal([bytes_of(number + 1)])
        clock.now += 61
    assert not cache.cached
    assert healer.why is None


def test_a_limit_is_told_by_a_sum_and_not_by_all_actions_of_the_minute() -> None:
    added = 0

    class Counted(int):
        """Knows how often one was added to a sum."""

        def __radd__(self, other: int) -> int:
            nonlocal added
            added += 1
            return int(other) + int(self)

    clock = Clock()
    guard = GuardRail(Limits(10_000, 1.0), clock)
    for _ in range(500):
        assert guard.admits(Counted(1), Counted(1), 10_000)
    assert 500 <= added <= 2000
    clock.now += SECONDS
    assert guard.admits(9_999, 0, 1)
    assert guard.admits(1, 0, 1)
    assert not guard.admits(1, 0, 1)
    guard.reopen()
    assert guard.admits(10_000, 0, 1)


def test_a_dry_run_says_each_thing_once() -> None:
    healer = made(shared(), HealPolicy.DRY_RUN)
    healer.heal([bytes_of(1)] * 5)
    assert said(healer.drain()) == {
        (HealAction.EVICT, HealOutcome.WOULD): 1,
        (HealAction.RECOMPUTE, HealOutcome.WOULD): 1,
        (HealAction.END, HealOutcome.WOULD): 1,
    }


def test_a_dry_run_leaves_out_what_a_request_reads_after_it_would_have_started_again() -> None:
    healer = made(shared(), HealPolicy.DRY_RUN)
    healer.heal([misread("a", 5, good=9)])
    healer.heal([misread("a", 1), misread("a", 5)])
    assert said(healer.drain()) == {
        (HealAction.EVICT, HealOutcome.WOULD): 1,
        (HealAction.RECOMPUTE, HealOutcome.WOULD): 1,
    }


def test_a_dry_run_leaves_out_who_is_given_a_block_that_would_have_left() -> None:
    cache = shared()
    healer = made(cache, HealPolicy.DRY_RUN)
    healer.heal([bytes_of(1)])
    healer.drain()
    cache.add("new", cache.cached[1], [1], sent=1)
    healer.heal([bytes_of(1)])
    assert healer.drain() == ()
    healer.choose(HealPolicy.DRY_RUN)  # a new policy begins anew
    healer.heal([bytes_of(1)])
    assert (HealAction.END, "new") in [(heal.action, heal.request) for heal in healer.drain()]


def test_a_dry_run_leaves_out_what_a_request_caches_after_it_would_have_ended() -> None:
    cache = shared()
    healer, cached = made(cache, HealPolicy.DRY_RUN), dict(cache.cached)
    cache.cached.clear()
    healer.heal([bytes_of(6)])
    assert said(healer.drain()) == {(HealAction.END, HealOutcome.WOULD): 1}
    cache.cached = cached
    healer.heal([bytes_of(6, again=True)])
    healer.heal([bytes_of(6, slot=25)])  # another slot of the block
    assert healer.drain() == ()
    healer.heal([bytes_of(5)])
    assert [(heal.action, heal.blocks) for heal in healer.drain()] == [(HealAction.EVICT, 1)]


def test_a_dry_run_leaves_out_what_was_damaged_before_its_page_was_full() -> None:
    cache = shared()
    healer, cached, request = made(cache, HealPolicy.DRY_RUN), dict(cache.cached), cache.running["c"]
    tokens, request.tokens, request.computed = request.tokens, request.tokens[:KEY_TOKENS], 6
    cache.cached.clear()
    healer.heal([bytes_of(6)])
    assert said(healer.drain()) == {(HealAction.END, HealOutcome.WOULD): 1}
    request.tokens, cache.cached = tokens, cached
    healer.heal([bytes_of(6, again=True)])
    assert healer.drain() == ()


def test_a_dry_run_leaves_out_what_comes_back_from_a_copy_that_would_have_left() -> None:
    cache = shared()
    healer = made(cache, HealPolicy.DRY_RUN)
    healer.heal([bytes_of(5, incident="i")])
    healer.drain()
    cache.add("new", range(60, 68), [8, 9], sent=1)
    healer.heal([bytes_of(8, incident="i")])
    assert healer.drain() == ()
    healer.heal([bytes_of(8, incident="later")])  # by then it has been computed anew
    assert said(healer.drain())[HealAction.EVICT, HealOutcome.WOULD] == 1


def test_a_dry_run_says_one_thing_of_a_request() -> None:
    cache = shared()
    cache.given_out = 3
    healer = made(cache, HealPolicy.DRY_RUN)
    healer.heal([bytes_of(1), bytes_of(2, good=3)])
    actions = [heal.action for heal in healer.drain() if heal.request == "a"]
    assert actions == [HealAction.END]


def test_a_dry_run_says_of_each_block_once_that_it_would_have_left() -> None:
    cache = shared()
    healer = made(cache, HealPolicy.DRY_RUN)
    healer.heal([bytes_of(1), bytes_of(1, filled=((0, 1), (0, 5)))])
    heals = [heal for heal in healer.drain() if heal.action is HealAction.EVICT]
    assert [heal.blocks for heal in heals] == [4, 2]


def test_an_action_that_fails_ends_healing_until_an_operator_chooses() -> None:
    cache = shared()
    cache.broken = True
    healer = made(cache, HealPolicy.PROTECT)
    healer.heal([bytes_of(1), bytes_of(6)])
    assert not cache.again + cache.ended
    assert "no such block" in str(healer.why)
    assert said(healer.drain())[HealAction.EVICT, HealOutcome.FAILED] == 1


def test_an_engine_that_does_not_agree_with_the_rehearsal_gets_a_dry_run() -> None:
    cache = shared()
    healer = made(cache, HealPolicy.OFF)
    healer.choose(HealPolicy.PROTECT, "no method touch")
    healer.heal([bytes_of(1)])
    assert healer.status().why == "no method touch"
    assert not cache.again + cache.ended


def test_off_does_nothing_at_once() -> None:
    cache = shared()
    healer = made(cache, HealPolicy.PROTECT)
    healer.choose(HealPolicy.OFF)
    healer.heal([bytes_of(1)])
    assert not healer.drain()
    assert len(cache.cached) == 6


def test_a_slot_that_is_damaged_again_after_it_was_written_anew_leaves_circulation() -> None:
    cache, clock = Cache(), Clock()
    healer = made(cache, HealPolicy.PROTECT, WIDE, clock)
    cache.add("a", range(4), [1])
    healer.heal([bytes_of(1), bytes_of(1)])
    assert not cache.out
    cache.add("b", range(4, 8), [1])
    healer.heal([bytes_of(1, slot=5)])
    assert not cache.out  # another slot of the block
    cache.add("c", range(8, 12), [1])
    clock.now = 3600.0
    healer.heal([bytes_of(1)])
    assert cache.out == {(0, 1)}
    assert healer.status().quarantined == (("full", 1),)
    assert healer.drain()[-1].action is HealAction.QUARANTINE
    healer.release([1])
    assert not cache.out
    assert healer.status().quarantined == ()
    assert healer.drain()[-1].outcome is HealOutcome.DONE


def test_damage_a_day_apart_is_no_pattern() -> None:
    cache, clock = Cache(), Clock()
    healer = made(cache, HealPolicy.PROTECT, WIDE, clock)
    for number in range(3):
        cache.add(f"r{number}", [number] * 4, [1])
        healer.heal([bytes_of(1)])
        clock.now += 86_401.0
    assert not cache.out


def test_quarantine_takes_no_more_than_the_share_of_the_pool() -> None:
    cache, clock = Cache(pool=8), Clock()
    healer = made(cache, HealPolicy.PROTECT, Limits(1000, 0.25), clock)
    for block in range(1, 6):
        for content in range(2):
            cache.add("r", [block, content, 0, 0], [block])
            healer.heal([bytes_of(block)])
            clock.now += 61
    assert len(cache.out) == 2
    refused = [heal for heal in healer.drain() if heal.outcome is HealOutcome.LIMITED]
    assert [(heal.action, heal.block) for heal in refused] == [(HealAction.QUARANTINE, n) for n in (3, 4, 5)]
    assert "2 of 8 blocks are in quarantine, the limit is 25%" in str(refused[0].detail)


def test_a_block_that_the_engine_cannot_do_without_stays_and_healing_goes_on() -> None:
    cache = Cache(needed={1})
    healer = made(cache, HealPolicy.PROTECT)
    for content in range(2):
        cache.add("r", [1, content, 0, 0], [1], sent=1)
        healer.heal([bytes_of(1)])
    assert (cache.out, cache.ended, healer.quarantined) == (set(), ["r", "r"], {})
    (refused,) = (heal for heal in healer.drain() if heal.action is HealAction.QUARANTINE)
    assert (refused.outcome, refused.detail) == (HealOutcome.LIMITED, "it would not hold one request")
    assert healer.effective is HealPolicy.PROTECT


def test_who_read_damage_before_it_was_written_over_is_ended_and_what_came_of_it_leaves() -> None:
    cache = Cache()
    cache.add("left", range(4), [1], sent=3)  # its window has left the damaged block
    cache.add("waits", [], [], sent=2)
    cache.add("spared", range(8, 12), [3], sent=3)
    cache.add("early", range(12, 16), [4], sent=2)
    healer = made(cache, HealPolicy.PROTECT)
    readers = (("left", 1), ("waits", 0), ("early", 2), ("gone", 0))
    healer.heal([bytes_of(3, overwritten=True, readers=readers, filled=((0, 1),))])
    assert sorted(cache.ended) == ["left", "waits"]
    assert cache.again == ["early"]  # none of its tokens came after
    assert sorted(cache.cached) == [3, 4]


def test_what_was_written_over_says_nothing_about_the_memory() -> None:
    cache = Cache()
    cache.add("a", range(4), [1])
    healer = made(cache, HealPolicy.PROTECT)
    healer.heal([bytes_of(1)])
    cache.add("b", range(4, 8), [1])
    healer.heal([bytes_of(1, overwritten=True)])
    assert not cache.out


def test_a_request_that_was_started_again_does_not_end_for_what_is_met_once_more() -> None:
    cache = Cache()
    cache.add("waits", [], [], sent=5)
    healer = made(cache, HealPolicy.PROTECT)
    healer.heal([misread("waits", 0)._replace(again=True)])
    assert not cache.ended
    healer.heal([misread("waits", 0)])  # what it sent before it was preempted
    assert cache.ended == ["waits"]


def test_what_was_dropped_when_a_request_started_again_does_not_end_it() -> None:
    """A second finding of the same forward may be read later, or by another rank."""
    for blocks, since, found, ended in (
        ([], 3, 9, False),  # it waits
        ([1], 12, 9, False),  # it runs again
        ([1], 12, 12, True),  # and has read something wrong again
        ([], 3, 7, True),  # tokens of that forward had left
    ):
        cache = Cache(given_out=20)
        request = cache.add("a", range(4 * len(blocks)), blocks, sent=5)
        request.since, request.dropped_after = since, 8
        made(cache, HealPolicy.PROTECT).heal([misread("a", 0, good=found - 1)._replace(found=found)])
        assert cache.ended == ["a"] * ended, (blocks, since, found)


def test_who_went_on_since_readers_were_listed_is_judged_by_what_it_had_sent_by_then() -> None:
    """Findings travel for a step or more; by then a reader may have started again."""
    for since, kept, again, ended in (
        (12, 2, False, False),  # cured
        (12, 3, False, True),  # goes on from a token of the damage
        (11, 2, False, True),  # it was listed as it is
    ):
        cache = Cache(given_out=12)
        request = cache.add("a", range(4), [1], sent=5)
        request.since, request.kept = since, kept
        healer = made(cache, HealPolicy.PROTECT)
        healer.heal([bytes_of(7, readers=(("a", 2),), filled=((0, 1),), listed=11)])
        assert (cache.again, cache.ended) == (["a"] * again, ["a"] * ended), (since, kept)


def test_who_joined_what_was_computed_from_damage_before_it_left_starts_again() -> None:
    cache = Cache(given_out=12)
    request = cache.add("a", range(8), [1, 2])
    request.since, request.joined = 12, 4
    cache.add("b", [*range(4), 8, 9, 10, 11], [1, 3]).since = 12  # it has filled all of it itself
    del cache.cached[3]
    cache.add("c", range(20, 24), [4]).since = 11  # what it has filled was listed
    made(cache, HealPolicy.PROTECT).heal([bytes_of(7, filled=((0, 1), (0, 4)), listed=11)])
    assert (cache.again, cache.ended) == (["a", "c"], [])


def test_a_request_that_waits_and_has_sent_nothing_wrong_is_let_be() -> None:
    cache = Cache()
    cache.add("waits", [], [], sent=2)
    healer = made(cache, HealPolicy.PROTECT)
    healer.heal([bytes_of(3, overwritten=True, readers=(("waits", 2),))])
    assert not cache.ended + cache.again
