"""The radix cache against a model that remembers every page by the tokens that lead to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from canary_obs.reference_engine.cache.pool import PageAllocator
from canary_obs.reference_engine.cache.radix_cache import Node, RadixCache

NUM_SLOTS = 96
Prefix = tuple[int, ...]

token_lists = st.lists(st.integers(0, 2), min_size=0, max_size=14)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), token_lists),
        st.tuples(st.just("match"), token_lists),
        st.tuples(st.just("lock"), token_lists),
        st.tuples(st.just("unlock"), st.integers(0, 7)),
        st.tuples(st.just("evict"), st.integers(0, 12)),
    ),
    max_size=40,
)


class PageModel:
    """Every held page by its whole prefix, and the same operations done the slow way."""

    def __init__(self, page_size: int) -> None:
        self.page = page_size
        self.allocator = PageAllocator(NUM_SLOTS, page_size)
        self.cache = RadixCache(NUM_SLOTS, page_size)
        self.pages: dict[Prefix, list[int]] = {}
        self.locks: list[tuple[Prefix, Node]] = []

    def longest(self, tokens: list[int]) -> Prefix:
        end = 0
        while end + self.page <= len(tokens) and tuple(tokens[: end + self.page]) in self.pages:
            end += self.page
        return tuple(tokens[:end])

    def slots(self, prefix: Prefix) -> list[int]:
        ends = range(self.page, len(prefix) + 1, self.page)
        return [slot for end in ends for slot in self.pages[prefix[:end]]]

    def locked(self) -> set[Prefix]:
        return {p[:end] for p, _ in self.locks for end in range(self.page, len(p) + 1, self.page)}

    def insert(self, tokens: list[int]) -> None:
        tokens = tokens[: len(tokens) - len(tokens) % self.page]
        count = len(tokens) // self.page
        if count > self.allocator.free_pages:
            return
        slots = self.allocator.allocate(count)
        held = self.longest(tokens)
        assert self.cache.insert(np.array(tokens, np.int32), slots) == len(held)
        self.allocator.free(slots[: len(held)])
        for end in range(len(held) + self.page, len(tokens) + 1, self.page):
            self.pages[tuple(tokens[:end])] = slots[end - self.page : end].tolist()

    def match(self, tokens: list[int]) -> Node:
        slots, node = self.cache.match(np.array(tokens, np.int32))
        assert slots.tolist() == self.slots(self.longest(tokens))
        return node

    def lock(self, tokens: list[int]) -> None:
        node = self.match(tokens)
        self.cache.lock(node)
        self.locks.append((self.longest(tokens), node))

    def unlock(self, which: int) -> None:
        if self.locks:
            self.cache.unlock(self.locks.pop(which % len(self.locks))[1])

    def evict(self, wanted: int) -> None:
        dropped = self.cache.evict(wanted)
        gone = {slot for slots in dropped for slot in slots.tolist()}
        for slots in dropped:
            self.allocator.free(slots)
        locked = self.locked()
        lost = {prefix for prefix, slots in self.pages.items() if gone & set(slots)}
        assert not lost & locked
        assert sum(len(self.pages.pop(prefix)) for prefix in lost) == len(gone)
        assert len(gone) >= wanted or set(self.pages) == locked

    def check(self) -> None:
        cache, locked = self.cache, self.locked()
        held = sorted(slot for slots in self.pages.values() for slot in slots)
        assert cache.held().tolist() == held
        free = sorted(slot for p, slots in self.pages.items() if p not in locked for slot in slots)
        assert cache.held(unlocked_only=True).tolist() == free
        assert cache.evictable == len(free)
        for prefix, slots in self.pages.items():
            before = self.pages[prefix[: -self.page]][-1] if len(prefix) > self.page else -1
            assert cache.position[slots].tolist() == list(range(len(prefix) - self.page, len(prefix)))
            assert cache.previous[slots].tolist() == [before, *slots[:-1]]


@settings(max_examples=150)
@given(page_size=st.sampled_from([1, 2, 3]), steps=operations)
def test_agrees_with_the_model(page_size: int, steps: list[tuple[str, object]]) -> None:
    model = PageModel(page_size)
    for name, argument in steps:
        getattr(model, name)(argument)
        model.check()


def inserted(cache: RadixCache, tokens: list[int], first: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    slots = np.arange(first, first + len(tokens), dtype=np.int64)
    cache.insert(np.array(tokens, np.int32), slots)
    return slots


def test_least_recently_used_goes_first() -> None:
    cache = RadixCache(64, 1)
    old, young = inserted(cache, [1, 2, 3], 0), inserted(cache, [4, 5], 10)
    assert [slots.tolist() for slots in cache.evict(1)] == [old.tolist()]
    old = inserted(cache, [1, 2, 3], 20)
    cache.match(np.array([4, 5], np.int32))
    assert [slots.tolist() for slots in cache.evict(1)] == [old.tolist()]
    assert [slots.tolist() for slots in cache.evict(9)] == [young.tolist()]
    assert cache.held().size == 0


def test_leaves_go_before_their_parents() -> None:
    cache = RadixCache(64, 1)
    trunk = inserted(cache, [1, 2], 0)
    inserted(cache, [1, 2, 3], 10)
    inserted(cache, [1, 2, 4], 20)
    assert [slots.tolist() for slots in cache.evict(4)] == [[12], [22], trunk.tolist()]


def test_reinsertion_is_seen_as_a_new_tenure() -> None:
    cache = RadixCache(64, 1)
    slots = inserted(cache, [1, 2, 3], 0)
    before = cache.clock
    cache.evict(3)
    inserted(cache, [1, 2, 3], 0)
    assert (cache.inserted_at[slots] > before).all()


def test_unlock_without_lock_is_refused() -> None:
    cache = RadixCache(64, 1)
    inserted(cache, [1, 2], 0)
    _, node = cache.match(np.array([1, 2], np.int32))
    with pytest.raises(ValueError, match="is not locked"):
        cache.unlock(node)
    _, root = cache.match(np.array([9], np.int32))
    with pytest.raises(ValueError, match="is not locked"):
        cache.unlock(root)


def test_broken_pages_are_refused() -> None:
    cache = RadixCache(64, 4)
    with pytest.raises(ValueError, match="page_size=4"):
        cache.insert(np.zeros(6, np.int32), np.arange(6))
    with pytest.raises(ValueError, match="4 slots"):
        cache.insert(np.zeros(8, np.int32), np.arange(4))
