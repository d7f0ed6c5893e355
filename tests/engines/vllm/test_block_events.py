"""The events of the scheduler's block pool, with blocks like vLLM's, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from canary_obs.engines.vllm import block_events, pending_events
from canary_obs.engines.vllm.pool_events import EventsLost, Published, PublishedRun


@dataclass
class Block:
    block_id: int
    block_hash: bytes | None = b"hash"
    is_null: bool = False


NULL = Block(0, None, is_null=True)


def published(blocks: list[Block], start: int, stop: int) -> list[object]:
    pool = SimpleNamespace()
    cache = block_events._around_cache_full_blocks(lambda *_, **__: None)
    cache(pool, None, blocks, start, stop, 16, 2)
    return vars(pool).get(pending_events.PENDING, [])


@pytest.mark.parametrize(
    ("blocks", "start", "expected"),
    [
        ([Block(3), Block(7), Block(5)], 0, [PublishedRun(2, (3, 7, 5), 0, -1, 16)]),
        ([Block(3), Block(7), Block(5)], 1, [PublishedRun(2, (7, 5), 1, 3, 16)]),
        ([Block(3), Block(7)], 1, [Published(2, 7, 1, 3, 16)]),
        ([NULL, NULL, Block(5), Block(6)], 0, [PublishedRun(2, (5, 6), 2, -1, 16)]),
        ([Block(3), NULL, Block(5)], 0, [Published(2, 3, 0, -1, 16), Published(2, 5, 2, -1, 16)]),
        # A block without a hash is not findable, and is the one before all the same.
        ([Block(3), Block(7, None), Block(5)], 0, [Published(2, 3, 0, -1, 16), Published(2, 5, 2, 7, 16)]),
        ([Block(3), Block(7, None)], 1, []),
        ([NULL, NULL], 0, []),
        ([Block(3), Block(7)], 2, []),
        ([Block(3), Block(7)], 3, []),
    ],
)
def test_runs_of_blocks(blocks: list[Block], start: int, expected: list[object]) -> None:
    assert published(blocks, start, len(blocks)) == expected


def test_a_hash_that_moves_is_found_within_a_run() -> None:
    pool = SimpleNamespace()
    pending_events.record(pool, PublishedRun(2, (3, 7, 5), 4, 9, 16))
    block_events._around_move_block_hashes(lambda *_: None)(pool, Block(7), Block(8))
    assert vars(pool)[pending_events.PENDING][-1] == Published(2, 8, 5, 3, 16)


def test_events_that_do_not_fit_are_counted_and_said(monkeypatch, caplog) -> None:
    monkeypatch.setattr(pending_events, "_MAX_PENDING", 4)
    pool = SimpleNamespace()
    for block in range(1, 12):
        pending_events.record(pool, block)
    assert vars(pool)[pending_events.PENDING] == [EventsLost(10), 11]
    assert "changed 10 times without a call of Scheduler.schedule, the limit is 4" in caplog.messages[-1]
