"""The mirror of the block pool, without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import example, given, strategies as st

from canary_obs.engine_api.views import CachedCount, CachedSlots
from canary_obs.engine_api.walks import CachedWalk
from canary_obs.engines.toolkit.later import Later
from canary_obs.engines.vllm import group_blocks
from canary_obs.engines.vllm.cache_count import BlockCounts
from canary_obs.engines.vllm.cached_blocks import CachedBlocks
from canary_obs.engines.vllm.pool_events import EventsLost, Loaded, Partial, Published, PublishedRun
from canary_obs.errors import UnsupportedEngine


def mirror(locked: set[int] | None = None) -> CachedBlocks:
    return CachedBlocks({"full": (0, 16, 4)}, lambda _: locked or set(), empty=True)


def held(blocks: CachedBlocks) -> list[tuple[int, int, int]]:
    found = blocks.cached("full", unlocked_only=False)
    return sorted(zip(found.slots.tolist(), found.positions.tolist(), found.previous.tolist(), strict=True))


def test_blocks_are_linked_to_the_block_before() -> None:
    blocks = mirror()
    blocks.apply([Published(0, 3, 0, -1, 4), Published(0, 7, 1, 3, 2)])
    first = [(12, 0, -1), (13, 1, 12), (14, 2, 13), (15, 3, 14)]
    assert held(blocks) == [*first, (28, 4, 15), (29, 5, 28)]


@pytest.mark.parametrize("asked", ["once the forward was launched", "by a sweep"])
def test_counts_that_come_later_are_asked_for_once(asked: str) -> None:
    blocks, computed = mirror(), list[int]()
    blocks.apply([Published(0, 3, 0, -1, 4)])
    assert not blocks.due

    def compute() -> list[BlockCounts]:
        computed.append(1)
        return [BlockCounts(1, 0)]

    blocks.apply((), Later(compute))
    assert (blocks.due, computed) == (True, [])
    if asked == "once the forward was launched":
        blocks.catch_up()
        assert (blocks.due, computed) == (False, [1])
        assert blocks._pending, "events wait until there are many"
    for _ in range(2):
        assert blocks.count("full") == CachedCount(slots=4, removed=0)
    assert computed == [1]
    blocks.apply((), Later(lambda: None))
    blocks.apply([Published(0, number, 0, -1, 4) for number in range(4, 16)] * 11)
    assert blocks.due
    blocks.catch_up()
    assert not blocks._pending
    assert blocks.count("full") is None


@given(
    runs=st.lists(
        st.tuples(
            st.lists(st.integers(0, 15), min_size=2, max_size=6, unique=True),
            st.integers(0, 9), st.integers(-1, 15), st.integers(1, 4), st.integers(-1, 15),
        ),
        min_size=1, max_size=6,
    )
)  # fmt: skip
def test_a_run_stands_for_its_blocks_one_by_one(runs) -> None:
    one_by_one, at_once = mirror(), mirror()
    for blocks, number, previous, filled, evicted in runs:
        # A block's predecessor is neither the block itself nor a later one of its run.
        run = PublishedRun(0, tuple(blocks), number, -1 if previous in blocks else previous, filled)
        events = [] if evicted < 0 else [evicted]
        one_by_one.apply([*map(run.single, range(len(blocks))), *events])
        at_once.apply([run, *events])
        assert held(one_by_one) == held(at_once)
        slots = torch.arange(64)
        later = [Published(0, blocks[0], 0, -1, 4)]
        one_by_one.apply(later)
        at_once.apply(later)
        assert torch.equal(one_by_one.still_cached("full", slots), at_once.still_cached("full", slots))


# A block is never its own predecessor.
_HIGH, _FILLED = st.integers(8, 15), st.integers(1, 4)


@given(
    events=st.lists(
        st.integers(0, 15)
        | st.builds(Published, st.integers(0, 1), _HIGH, st.integers(0, 3), st.integers(-1, 7), _FILLED)
        | st.builds(Published, st.just(0), st.integers(0, 7), st.integers(0, 3), _HIGH, _FILLED)
        | st.builds(Partial, st.just(0), st.integers(0, 15), st.integers(0, 3), _FILLED)
        | st.none(),
        max_size=24,
    ),
    walked=st.integers(0, 24), limit=st.integers(1, 64),
)  # fmt: skip
@example(events=[Partial(0, 0, 0, 1), 0, 0], walked=0, limit=1)  # dropped twice at once
def test_events_may_be_applied_later(events, walked, limit) -> None:
    """One worker applies each event at once, as somebody asks after each; the other when it is asked."""
    shapes = {"full": (0, 16, 4), "state": (1, 16, 0), "scale": (-1, 16, 0)}
    at_once, later = (CachedBlocks(shapes, lambda _: set(), empty=True) for _ in range(2))
    walks: list[CachedWalk] = []
    for number, event in enumerate(events):
        if number == walked:
            walks = [at_once.walk("full"), later.walk("full")]
        at_once.apply([event])
        at_once.live_blocks("full")
        later.apply([event])
    taken = [[walk.take(limit), walk.take(64)] for walk in reversed(walks)]
    for early, late in zip(*taken, strict=True) if taken else ():
        assert torch.equal(early.previous, late.previous)
        assert torch.equal(early.positions, late.positions)
    for group in ("state", "full"):
        slots = torch.arange(16 if group == "state" else 64)
        assert torch.equal(later.still_cached(group, slots), at_once.still_cached(group, slots))
        assert later.live_blocks(group).tolist() == at_once.live_blocks(group).tolist()
        assert later.walk(group).total == at_once.walk(group).total
    assert held(later) == held(at_once)


def test_no_link_to_a_block_that_was_replaced() -> None:
    blocks = mirror()
    blocks.apply([Published(0, 3, 0, -1, 4), Published(0, 7, 1, 3, 4), 3, Published(0, 3, 5, -1, 4)])
    assert (28, 4, -1) in held(blocks)


def test_where_events_were_lost_nothing_is_known_until_a_reset() -> None:
    blocks = mirror()
    blocks.apply(
        [Published(0, 3, 0, -1, 4), EventsLost(9), Published(0, 7, 0, -1, 1)], [BlockCounts(2, 0, ((3, 1),))]
    )
    assert held(blocks) == [(28, 0, -1)]
    assert blocks.count("full") == CachedCount(slots=5, removed=0)  # a sweep of one slot fails
    assert blocks.live_blocks("full").tolist() == list(range(1, 16))
    blocks.apply([None, Published(0, 5, 0, -1, 4)])
    assert blocks.live_blocks("full").tolist() == [5]


def test_what_was_evicted_since_is_not_held() -> None:
    blocks = mirror()
    blocks.apply([Published(0, 3, 0, -1, 4), Published(0, 7, 1, 3, 4)])
    blocks.cached("full", unlocked_only=False)
    slots = torch.tensor([12, 28, 29])
    assert blocks.still_cached("full", slots).tolist() == [True, True, True]
    blocks.apply([3, Published(0, 3, 0, -1, 4)])
    # Slot 28 is linked to slot 15 of block 3, which is another block's now: a sweep leaves the link out.
    assert blocks.still_cached("full", slots).tolist() == [False, True, True]
    assert blocks.still_cached("full", torch.tensor([15])).tolist() == [False]


def taken(walk: CachedWalk, limit: int, between: Iterable[Callable[[], None]] = ()) -> list[CachedSlots]:
    """The parts of a walk; what is to be done between them."""
    parts, todo = [], iter(between)
    while (part := walk.take(limit)).slots.numel():
        parts.append(part)
        next(todo, lambda: None)()
    return parts


def rows(part: CachedSlots) -> list[tuple[int, int, int]]:
    return list(zip(part.slots.tolist(), part.positions.tolist(), part.previous.tolist(), strict=True))


def test_a_walk_shows_what_was_cached_when_it_began() -> None:
    """While blocks are evicted, cached again, filled and added."""
    blocks = mirror()
    blocks.apply([PublishedRun(0, (1, 2, 3), 0, -1, 4), Partial(0, 5, 7, 2), Published(0, 6, 0, -1, 4)])
    before = held(blocks)
    walk = blocks.walk("full")
    assert walk.total == len(before) == 18
    events = [2, Partial(0, 5, 7, 3), 6, Published(0, 6, 9, -1, 4), Published(0, 9, 0, -1, 4)]
    found = [
        row for part in taken(walk, 4, [lambda: blocks.apply(events)]) for row in zip(
            rows(part), blocks.still_cached("full", part.slots).tolist(), strict=True)
    ]  # fmt: skip
    assert sorted(slot for (slot, _, _), _ in found) == [slot for slot, _, _ in before]
    still = {slot for (slot, _, _), kept in found if kept}
    assert still == {4, 5, 6, 7, 12, 13, 14, 15, 20, 21}
    # Block 3 is linked to block 2, which is not cached any more.
    expected = {row for row in before if row[0] in still} - {(12, 8, 11)} | {(12, 8, -1)}
    assert {row for row, kept in found if kept} == expected
    assert blocks.walk("full").total == len(held(blocks)) == 19


def test_a_walk_passes_over_blocks_that_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_blocks, "_SCANNED", 3)
    blocks = mirror()
    blocks.apply([Published(0, 1, 0, -1, 4), Published(0, 15, 0, -1, 4)])
    assert [part.slots.tolist() for part in taken(blocks.walk("full"), 8)] == [[4, 5, 6, 7], [60, 61, 62, 63]]
    blocks.apply([None])
    assert (blocks.walk("full").total, taken(blocks.walk("full"), 8)) == (0, [])


@given(
    first=st.lists(st.integers(1, 15), min_size=1, max_size=15, unique=True),
    changes=st.lists(
        st.one_of(
            st.integers(1, 15),
            st.builds(
                lambda block, number: Published(0, block, number, -1, 4),
                st.integers(1, 15),
                st.integers(0, 9),
            ),
            st.none(),
        ),
        max_size=12,
    ),
    limit=st.integers(1, 20),
)
def test_no_slot_is_missed_or_shown_wrongly_while_the_cache_changes(first, changes, limit) -> None:
    blocks = mirror()
    blocks.apply([Published(0, block, place, -1, 4) for place, block in enumerate(first)])
    before = held(blocks)
    changed: set[int] = set()

    def change(event) -> Callable[[], None]:
        def apply() -> None:
            blocks.apply([event])
            changed.update(range(16) if event is None else [event if isinstance(event, int) else event.block])

        return apply

    shown = []
    for part in taken(blocks.walk("full"), limit, map(change, changes)):
        kept = blocks.still_cached("full", part.slots).tolist()
        shown += [(row, here) for row, here in zip(rows(part), kept, strict=True)]
        for (slot, _, _), here in shown[-len(kept) :]:
            assert here is (slot // 4 not in changed)
    assert sorted(row[0] for row, _ in shown) == [row[0] for row in before]
    assert blocks.walk("full").total == len(held(blocks))
    assert {row for row, here in shown if here} <= set(before)


def test_other_groups_loads_and_resets() -> None:
    blocks = mirror()
    blocks.apply([Published(1, 2, 0, -1, 4), Loaded(0, (5,), 0, 0, 4, "a"), Published(0, 3, 0, -1, 4)])
    assert blocks.live_blocks("full").tolist() == [3]
    blocks.apply([None])
    assert blocks.live_blocks("full").tolist() == []


def test_blocks_of_running_requests_are_left_out_on_wish() -> None:
    blocks = mirror(locked={3})
    blocks.apply([Published(0, 3, 0, -1, 4), Published(0, 4, 0, -1, 4)])
    assert blocks.cached("full", unlocked_only=True).slots.tolist() == [16, 17, 18, 19]


def test_a_scheduler_that_does_not_report_is_an_error_and_not_an_empty_cache() -> None:
    blocks = mirror()
    assert held(blocks) == []
    blocks.apply(None)
    with pytest.raises(UnsupportedEngine, match="does not report"):
        blocks.cached("full", unlocked_only=False)


def test_a_block_of_states_is_one_slot_and_a_sequence_of_its_own() -> None:
    blocks = CachedBlocks({"full": (0, 16, 4), "state": (1, 16, 0)}, lambda _: set(), empty=True)
    events = [PublishedRun(1, (3, 5), 2, 1, 4), Published(1, 7, 4, 5, 4), Partial(1, 8, 5, 2)]
    blocks.apply(events, [BlockCounts(0, 0), BlockCounts(4, 1, ((2, 1),))])
    found = blocks.cached("state", unlocked_only=False)
    assert found.slots.tolist() == [3, 5, 7, 8]
    assert found.positions.tolist() == [0] * 4
    assert found.previous.tolist() == [-1] * 4
    assert blocks.walk("state").total == 4
    assert blocks.count("state") == CachedCount(slots=4, removed=1)
    blocks.apply([5])
    assert blocks.live_blocks("state").tolist() == [3, 7, 8]
    assert not held(blocks)


def test_a_group_that_caches_nothing_hears_of_every_block() -> None:
    blocks = CachedBlocks({"full": (0, 16, 4), "scale": (-1, 16, 0)}, lambda _: set(), empty=True)
    blocks.apply([Published(0, 15, 0, -1, 4), 15, None], [BlockCounts(0, 1)])
    assert blocks.count("scale") == CachedCount(slots=0, removed=0)
    assert blocks.walk("scale").total == 0


def test_a_slot_of_several_tokens_is_cached_with_the_last_of_them() -> None:
    """Blocks of 32 tokens: 4 slots of 8."""
    blocks = CachedBlocks({"full": (0, 16, 4)}, lambda _: set(), empty=True, slot_tokens={"full": 8})
    run, part = PublishedRun(0, (3, 5), 0, -1, 32), Partial(0, 7, 2, 20)
    blocks.apply([run, part, Published(0, 9, 0, -1, 32)], [BlockCounts(4, 2, ((12, 1),))])
    assert blocks.cached("full", unlocked_only=False).slots.tolist() == [
        *range(12, 16),
        *range(20, 24),
        28,
        29,
        *range(36, 40),
    ]
    assert blocks.count("full") == CachedCount(slots=14, removed=8)
    assert blocks.walk("full").total == 14
    blocks.apply([Partial(0, 7, 2, 27)], [BlockCounts(4, 2, ((5, 1),))])
    assert blocks.walk("full").total == 15
    assert blocks.count("full") == CachedCount(slots=15, removed=8)
