"""Blocks counted in the map of cached blocks, with a map like vLLM's, without vLLM."""

from __future__ import annotations

import pickle
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engine_api.views import CachedCount
from canary_obs.engines.toolkit.later import Later
from canary_obs.engines.vllm import cache_count
from canary_obs.engines.vllm.cache_count import BlockCounts
from canary_obs.engines.vllm.cached_blocks import CachedBlocks
from canary_obs.engines.vllm.pool_events import Partial, Published


class Map:
    """The last character of a key is its group."""

    def __init__(self) -> None:
        self._cache: dict[str, Any] = {}

    def insert(self, key: str, block: Any) -> None:
        self._cache.setdefault(key, {})[block.block_id] = block

    def pop(self, key: str, block_id: int) -> Any:
        found = self._cache.get(key, {}).pop(block_id, None)
        if not self._cache.get(key):
            self._cache.pop(key, None)
        return found


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Map:
    monkeypatch.setattr(cache_count, "_group_reader", lambda: lambda key: int(key[-1]))
    monkeypatch.setattr(Map, "insert", cache_count._around_insert(Map.insert))
    monkeypatch.setattr(Map, "pop", cache_count._around_pop(Map.pop))
    return Map()


def block(number: int) -> Any:
    return SimpleNamespace(block_id=number)


def test_blocks_count_once_however_many_keys_they_have(held: Map) -> None:
    for key, number in (("a0", 1), ("a0", 2), ("b0", 2), ("c1", 3)):
        held.insert(key, block(number))
    count = cache_count.count_of(held)
    assert list(count.all_counts(3)) == [(2, 0, ()), (1, 0, ()), (0, 0, ())]
    held.pop("b0", 2)
    held.pop("b0", 9)
    assert count.all_counts(1)[0] == BlockCounts(2, 0)
    held.pop("a0", 2)
    assert count.all_counts(1)[0] == BlockCounts(1, 1)


def test_what_a_map_holds_at_first_is_counted(held: Map, monkeypatch: pytest.MonkeyPatch) -> None:
    held._cache = {"a0": block(1), "b0": {2: block(2), 3: block(3)}, "c1": block(4)}
    assert cache_count.count_of(held).all_counts(1)[0] == BlockCounts(3, 0)
    held.insert("d0", block(5))
    assert cache_count.count_of(held).all_counts(1)[0] == BlockCounts(4, 0)


@pytest.mark.parametrize("most", [1, 3, 1 << 12])
@pytest.mark.parametrize("many", [1, 32])
def test_blocks_that_are_counted_together_are_counted_as_one_by_one(
    held: Map, monkeypatch: pytest.MonkeyPatch, most: int, many: int
) -> None:
    monkeypatch.setattr(cache_count, "_MOST_CHANGES", most)
    monkeypatch.setattr(cache_count, "_MANY_CHANGES", many)
    monkeypatch.setattr(cache_count, "_FIRST_BLOCKS", 2)
    generator, count, left = Random(1), cache_count.count_of(held), [0, 0]
    for step in range(400):
        number = generator.randrange(20)
        group = number % 2  # a block belongs to one group
        key = f"{generator.choice('abc')}{number}-{group}"
        before = {each for blocks in held._cache.values() for each in blocks}
        if generator.randrange(3) and key not in held._cache:
            held.insert(key, block(number))
        else:
            held.pop(key, number)
        after = {each for blocks in held._cache.values() for each in blocks}
        left[group] += len(before - after)
        if step % 7 == 0 or step == 399:
            cached = [sum(each % 2 == group for each in after) for group in range(2)]
            assert count.all_counts(2) == tuple(zip(cached, left, ((), ()), strict=True))


@pytest.mark.parametrize("keys", ["a", "ab"])
def test_a_prompt_displaces_blocks_and_takes_some_of_them(held: Map, keys: str) -> None:
    for key in keys:
        for number in range(40):
            held.insert(f"{key}{number}-{number % 2}", block(number))
    count = cache_count.count_of(held)
    assert count.all_counts(2) == ((20, 0, ()), (20, 0, ()))
    for number in range(30):
        held.pop(f"a{number}-{number % 2}", number)
    for number in range(10, 20):
        held.insert(f"c{number}-{number % 2}", block(number))
    kept = len(keys) > 1
    assert count.all_counts(2) == tuple((20, 0, ()) if kept else (10, 15, ()) for _ in range(2))


@pytest.mark.parametrize("asked", ["in time", "after more", "by the next", "in another process"])
def test_counts_of_a_prompt_are_those_of_its_output(held: Map, asked: str) -> None:
    """Whenever they are asked for: at the latest with those of the next output."""
    scheduler = scheduler_of(held)
    assert sent_counts(scheduler) == ((0, 0, ()),)
    for number in range(40):
        held.insert(f"a{number}-0", block(number))
    later = sent_counts(scheduler)
    assert isinstance(later, Later)
    if asked == "in another process":
        assert pickle.loads(pickle.dumps(later)) == ((40, 0, ()),)
    if asked == "in time":
        assert later.get() == ((40, 0, ()),)
    for number in range(3):
        held.pop(f"a{number}-0", number)
    if asked == "by the next":
        assert sent_counts(scheduler) == ((37, 3, ()),)
    assert later.get() == ((40, 0, ()),)
    assert later.get() is later.get()
    assert cache_count.count_of(held).all_counts(1) == ((37, 3, ()),)


def test_counts_that_are_still_to_be_computed_are_not_those_before(held: Map) -> None:
    scheduler, count = scheduler_of(held), cache_count.count_of(held)
    assert sent_counts(scheduler) == ((0, 0, ()),)
    for number in range(40):
        held.insert(f"a{number}-0", block(number))
    sent_counts(scheduler)
    assert count.reported is None
    for number in range(40, 80):
        held.insert(f"a{number}-0", block(number))
    assert sent_counts(scheduler).get() == ((80, 0, ()),)


def test_counts_that_fail_are_unknown_and_reported(
    held: Map, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, count = scheduler_of(held), cache_count.count_of(held)
    for _ in range(40):
        count.note("a key without a group", 1)
    assert sent_counts(scheduler).get() is None
    assert "send_counts" in caplog.text
    held.insert("a1-0", block(1))
    assert sent_counts(scheduler) == ((1, 0, ()),)


def scheduler_of(held: Map) -> Any:
    pool = SimpleNamespace(cached_block_hash_to_block=held)
    config = SimpleNamespace(kv_cache_groups=[None])
    return SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=pool, kv_cache_config=config))


def sent_counts(scheduler: Any) -> Any:
    output = SimpleNamespace()
    cache_count.send_counts(scheduler, output)
    return vars(output)[cache_count.COUNTS_ATTRIBUTE]


def test_a_pool_of_one_group_does_not_read_its_keys(held: Map, monkeypatch: pytest.MonkeyPatch) -> None:
    count = cache_count.count_of(held)
    assert count.all_counts(1) == ((0, 0, ()),)
    monkeypatch.setattr(cache_count, "_group_reader", lambda: pytest.fail)
    for number in range(40):
        held.insert(f"a{number}-0", block(number))
    assert count.all_counts(1) == ((40, 0, ()),)


def test_a_reset_removes_all_and_is_remembered_by_the_next_map(held: Map) -> None:
    held.insert("a0", block(1))
    following = Map()
    assert cache_count.count_of(held).all_counts(1) == ((1, 0, ()),)
    cache_count.carry_over(held, following)
    assert cache_count.count_of(following).all_counts(1) == ((0, 1, ()),)
    following.insert("a0", block(1))
    assert cache_count.count_of(following).all_counts(1)[0] == BlockCounts(1, 1)


def test_blocks_that_are_cached_in_part(held: Map) -> None:
    count = cache_count.count_of(held)
    count.note("a0", 1)
    assert count.all_counts(1) == ((1, 0, ()),)
    count.fill(0, 1, 10)
    assert count.all_counts(1) is count.all_counts(1)
    count.fill(0, 1, 10)  # the same prompt again
    assert count.all_counts(1)[0] == BlockCounts(1, 0, ((10, 1),))
    count.note("a0", 2)
    count.note("a0", 2)
    count.fill(0, 2, 12)  # its first key stands for the whole block
    assert count.all_counts(1)[0] == BlockCounts(2, 0, ((10, 1),))
    count.note("a0", 3)
    count.fill(0, 3, 10)
    count.note("a0", 4)
    count.fill(0, 4, 3)
    assert count.all_counts(1)[0] == BlockCounts(4, 0, ((3, 1), (10, 2)))
    count.fill(0, 3, 3)  # a longer prompt ends in it
    assert count.all_counts(1)[0] == BlockCounts(4, 0, ((3, 2), (10, 1)))
    for block in (1, 3, 4):
        count.note("a0", ~block)
    assert count.all_counts(1)[0] == BlockCounts(1, 3)


def test_the_mirror_and_the_count_agree_about_parts() -> None:
    blocks = CachedBlocks({"full": (0, 16, 4)}, lambda _: set(), empty=True)
    assert blocks.count("full") == CachedCount(slots=0, removed=0)
    published = [Published(0, 3, 0, -1, 4), Partial(0, 5, 1, 2), Partial(0, 3, 0, 2)]
    blocks.apply(published, [BlockCounts(2, 7, ((2, 1),))])
    assert blocks.count("full") == CachedCount(slots=6, removed=28)
    assert blocks.cached("full", unlocked_only=False).slots.tolist() == [12, 13, 14, 15, 20, 21]
    blocks.cached("full", unlocked_only=False)
    blocks.apply([Partial(0, 5, 1, 2), Partial(0, 5, 1, 3)], None)
    assert blocks.still_cached("full", blocks.cached("full", unlocked_only=False).slots).all()
    assert blocks.count("full") is None
