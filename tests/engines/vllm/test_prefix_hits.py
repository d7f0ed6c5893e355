"""Hits as the scheduler counts them and as a worker shows them; with a real vLLM: real/test_accounts.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.vllm.prefix_hits import HITS_ATTRIBUTE, TOKENS, PrefixHits, note_hit, send_hits

SIZES = 4, 8  # tokens per block of the groups


class Side:
    """A scheduler's manager and a worker, which see the same outputs."""

    def __init__(self) -> None:
        own = [SimpleNamespace(block_size=size) for size in SIZES]
        self.manager = SimpleNamespace(
            kv_cache_config=SimpleNamespace(kv_cache_groups=own),
            coordinator=SimpleNamespace(single_type_managers=own),
        )
        groups = [("full", 0), ("swa", 1), ("draft", 0)]
        shown = [
            SimpleNamespace(
                view=SimpleNamespace(name=name),
                number=number,
                block_size=SIZES[number],
                block_slots=SIZES[number],
            )
            for name, number in groups
        ]
        self.hits = PrefixHits(shown)  # type: ignore[arg-type]
        self.shown: dict[str, list[int]] = {}

    compares_hits = True

    def hit(self, group: str, slots: Any) -> None:
        assert group not in self.shown
        self.shown[group] = slots.tolist()

    def step(self, output: Any, loaded_from: dict[str, int] | None = None) -> dict[str, list[int]]:
        """The blocks shown by group; their slots must be all of the blocks' slots, and as many as counted."""
        before = dict(self.hits.counted or {})
        send_hits(SimpleNamespace(kv_cache_manager=self.manager), output)
        self.shown = {}
        self.hits.note(output)
        self.hits.report(output, loaded_from or {}, self)  # type: ignore[arg-type]
        assert self.hits.counted is not None
        sizes = {"full": SIZES[0], "swa": SIZES[1], "draft": SIZES[0]}
        counted = {name: count - before[name] for name, count in self.hits.counted.items()}
        assert counted == {name: len(self.shown.get(name, ())) for name in counted}
        blocks = {name: sorted({slot // sizes[name] for slot in slots}) for name, slots in self.shown.items()}
        for name, found in blocks.items():
            size = sizes[name]
            assert self.shown[name] == [block * size + offset for block in found for offset in range(size)]
        return blocks


def output(
    new: dict[str, tuple[int, list[list[int]]]] | None = None,
    resumed: dict[str, tuple[int, list[list[int]]]] | None = None,
    running: dict[str, int] | None = None,
    copies: list[tuple[int, int]] | None = None,
    ended: tuple[str, ...] = (),
) -> Any:
    """A scheduler output: by request, tokens computed before and blocks by group."""
    resumed, running = resumed or {}, running or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=count, block_ids=blocks)
            for name, (count, blocks) in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[*running, *resumed],
            num_computed_tokens=[*running.values(), *(count for count, _ in resumed.values())],
            new_block_ids=[*([[9], [9]] for _ in running), *(blocks for _, blocks in resumed.values())],
            resumed_req_ids=set(resumed),
        ),
        kv_cache_block_copies=copies,
        finished_req_ids=set(ended),
    )


@pytest.fixture
def side() -> Side:
    return Side()


def test_whole_blocks_of_every_group_without_null_blocks(side: Side) -> None:
    note_hit(side.manager, "a", 16)
    shown = side.step(output(new={"a": (16, [[5, 6, 7, 8, 20], [0, 3, 21]])}, running={"b": 40}))
    assert shown == {"full": [5, 6, 7, 8], "swa": [3], "draft": [5, 6, 7, 8]}
    assert side.step(output(running={"a": 20, "b": 41})) == {}


def test_slots_that_nobody_compares_are_not_listed(side: Side) -> None:
    note_hit(side.manager, "a", 8)
    side.compares_hits = False
    given = output(new={"a": (8, [[5, 6], [3]])})
    send_hits(SimpleNamespace(kv_cache_manager=side.manager), given)
    side.hits.report(given, {}, side)  # type: ignore[arg-type]
    assert side.shown == {}


def test_a_hit_that_ends_inside_a_block_of_another_group(side: Side) -> None:
    note_hit(side.manager, "a", 12)
    shown = side.step(output(new={"a": (12, [[5, 6, 7, 20], [3, 4]])}))
    assert shown == {"full": [5, 6, 7], "swa": [3, 4], "draft": [5, 6, 7]}


def test_requests_without_a_hit(side: Side) -> None:
    assert side.step(output(new={"a": (0, [[5, 6], [7]])})) == {}


def test_a_block_that_two_requests_share_counts_once(side: Side) -> None:
    note_hit(side.manager, "a", 8)
    note_hit(side.manager, "b", 16)
    blocks = {"a": (8, [[5, 6, 9], [3, 9]]), "b": (16, [[5, 6, 7, 8], [3, 4]])}
    assert side.step(output(new=blocks))["full"] == [5, 6, 7, 8]


def test_a_resumed_request_joins_again(side: Side) -> None:
    note_hit(side.manager, "a", 8)
    shown = side.step(output(resumed={"a": (8, [[5, 6, 9], [3]])}))
    assert shown == {"full": [5, 6], "swa": [3], "draft": [5, 6]}


def test_a_partial_block_is_a_copy(side: Side) -> None:
    """Its last tokens are the request's own; what is copied into it is compared as a copy."""
    note_hit(side.manager, "a", 6)
    shown = side.step(output(new={"a": (6, [[5, 30], [31]])}, copies=[(6, 30), (3, 31)]))
    assert shown == {"full": [5], "draft": [5]}


def test_loaded_blocks_are_no_hit(side: Side) -> None:
    note_hit(side.manager, "a", 8)
    shown = side.step(output(new={"a": (16, [[5, 6, 7, 8], [3, 4]])}), {"a": 8})
    assert shown == {"full": [5, 6], "swa": [3], "draft": [5, 6]}


def test_a_request_that_waits_for_its_load_counts_when_it_is_scheduled(side: Side) -> None:
    note_hit(side.manager, "a", 8)
    assert side.step(output()) == {}
    assert side.step(output(new={"a": (16, [[5, 6, 7, 8], [3, 4]])}), {"a": 8})["full"] == [5, 6]


def test_a_request_that_ends_while_it_waits_is_forgotten(side: Side) -> None:
    note_hit(side.manager, "a", 8)
    side.step(output(ended=("a",)))
    assert vars(side.manager)[TOKENS] == {}


def test_hits_before_the_first_output_were_not_asked_for(side: Side) -> None:
    note_hit(side.manager, "a", 8)
    early = output(new={"a": (8, [[5, 6], [3]])})
    send_hits(SimpleNamespace(kv_cache_manager=side.manager), early)
    note_hit(side.manager, "b", 8)
    assert side.step(output(new={"b": (8, [[7, 8], [4]])}))["full"] == [7, 8]


def test_an_output_that_came_past_the_worker_is_missing(side: Side) -> None:
    side.step(output())
    note_hit(side.manager, "a", 8)
    send_hits(SimpleNamespace(kv_cache_manager=side.manager), output(new={"a": (8, [[5, 6], [3]])}))
    after = output()
    send_hits(SimpleNamespace(kv_cache_manager=side.manager), after)
    side.hits.note(after)
    assert side.hits.counted == {"full": 8, "swa": 8, "draft": 8}


def test_a_scheduler_that_does_not_report(side: Side) -> None:
    none = {"full": 0, "swa": 0, "draft": 0}
    assert side.step(output()) == {}
    assert side.hits.counted == none
    plain = output()
    assert not hasattr(plain, HITS_ATTRIBUTE)
    side.hits.note(plain)
    assert side.hits.counted is None
    again = output()
    send_hits(SimpleNamespace(kv_cache_manager=side.manager), again)
    side.hits.note(again)
    assert side.hits.counted == none
