"""Tokens out of the window and diverging ones, compared with a loop over every token."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from canary_obs.engine_api.views import GroupView
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.window_tables import ScheduledRequest, WindowTables, scheduled_requests


def group(number: int, name: str, window: int | None = None, size: int = 4, draft: bool = False) -> VllmGroup:
    view = GroupView(name=name, num_slots=400, page_size=size, sources=(), window=window)
    return VllmGroup(
        number=number, num_blocks=400 // size, block_size=size, view=view, layers=(), draft=draft
    )


def by_token(
    full: VllmGroup, windowed: VllmGroup, requests: list[ScheduledRequest], lists
) -> tuple[int, int]:
    missing = diverging = 0
    for request, before, after in requests:
        kept_from = max(0, before - windowed.view.window + 1) // windowed.block_size
        for position in range(after):
            order, offset = divmod(position, windowed.block_size)
            block = lists[windowed.number][request][order] if order >= kept_from else 0
            other = lists[full.number][request][position // full.block_size] * full.block_size
            if not block:
                missing += 1
            elif block * windowed.block_size + offset != other + position % full.block_size:
                diverging += 1
    return missing, diverging


@pytest.mark.parametrize("sizes", [(4, 4), (8, 4), (4, 8), (6, 4)])
def test_as_a_loop_over_every_token(sizes: tuple[int, int]) -> None:
    full, windowed = group(0, "full", size=sizes[0]), group(1, "swa", window=10, size=sizes[1])
    seen = set()
    for seed in range(300):
        draw = random.Random(seed)
        requests = [ScheduledRequest(f"r{i}", before, before + draw.randrange(1, 30))
                  for i in range(3) for before in (draw.choice([0, 1, 9, 10, 13, 40]),)]  # fmt: skip
        lists = {
            found.number: {
                # Few block numbers, so that some are the same in both groups, and null ones among them.
                row.request: [
                    draw.randrange(found.number == 0, 3) for _ in range(row.after // found.block_size + 2)
                ]
                for row in requests
            }
            for found in (full, windowed)
        }
        tokens = WindowTables([full, windowed]).compare(requests, lists)
        assert tokens is not None
        assert (tokens.full, tokens.windowed) == (("full",), ("swa",))
        assert (tokens.out_of_window, tokens.diverging) == by_token(full, windowed, requests, lists)
        seen.add((tokens.out_of_window, tokens.diverging))
    assert len(seen) > 100


def test_of_several_groups_the_least() -> None:
    found = [group(0, "swa", 8), group(1, "swa2", 4), group(2, "full"), group(3, "draft", 4, draft=True)]
    blocks = [1, 2, 3, 4]
    lists = {0: {"a": [5, 6, 7, 8]}, 1: {"a": [9, 10, 3, 4]}, 2: {"a": blocks}}
    tokens = WindowTables(found).compare([ScheduledRequest("a", 15, 16)], lists)
    assert tokens is not None
    assert (tokens.full, tokens.windowed) == (("full",), ("swa", "swa2"))
    # swa: 8 tokens passed, 8 others differ. swa2: 12 passed, the 4 left are shown the full group's slots.
    assert (tokens.out_of_window, tokens.diverging) == (8, 0)


@pytest.mark.parametrize(
    "found",
    [
        [group(0, "full")],
        [group(0, "swa", 8)],
        [group(0, "full"), group(0, "draft", 8, draft=True)],
        [],
    ],
)
def test_without_both_kinds_there_is_nothing_to_compare(found: list[VllmGroup]) -> None:
    tables = WindowTables(found)
    assert tables.numbers == set()
    assert tables.compare([ScheduledRequest("a", 15, 16)], {}) is None


def test_requests_that_ended_are_left_out() -> None:
    tables = WindowTables([group(0, "full"), group(1, "swa", 8)])
    assert tables.compare([ScheduledRequest("ended", 15, 16)], {0: {}, 1: {}}) is None
    lists = {0: {"a": [1, 2]}, 1: {"a": [3, 4]}}
    tokens = tables.compare([ScheduledRequest("ended", 15, 16), ScheduledRequest("a", 4, 5)], lists)
    assert tokens is not None
    assert (tokens.out_of_window, tokens.diverging) == (0, 5)


def test_who_is_scheduled_requests_a_scheduler_output() -> None:
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=32)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["old", "waits"], num_computed_tokens=[7, 9]),
        num_scheduled_tokens={"new": 5, "old": 1},
    )
    assert set(scheduled_requests(output)) == {ScheduledRequest("new", 32, 37), ScheduledRequest("old", 7, 8)}
