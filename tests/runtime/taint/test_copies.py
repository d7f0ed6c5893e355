"""KV computed from damage that may be stored in a lower tier, and come back from there."""

from __future__ import annotations

import pytest

from canary_obs.engine_api.requests import ChangedRequests, GrownBlocks
from tests.runtime.taint.test_tracker import SIZE, Engine

STORED = "KV computed from it may be stored in a tier: who loads that is not listed"


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_what_a_reader_filled_whole_may_be_loaded_again_by_others(engine: Engine) -> None:
    engine.begin("writer", [1])
    engine.forward()
    engine.find(1)
    engine.elsewhere = "a tier"
    engine.begin("ends within its block", [1, 2], joined=1)
    engine.forward()
    engine.end("ends within its block", 1)
    assert engine.damages[0].cause is None
    engine.begin("reader", [1, 3], joined=1)
    assert engine.damages[0].cause is None
    engine.forward()
    engine.grow("reader", [4])
    assert engine.damages[0].cause == STORED


@pytest.mark.parametrize(("emitted", "cause"), [(1, None), (2, STORED), (None, STORED)])
def test_the_last_block_of_a_reader_that_ended_may_be_whole(
    engine: Engine, emitted: int | None, cause: str | None
) -> None:
    engine.elsewhere = "a tier"
    engine.begin("reader", [1])
    engine.forward()
    engine.find(1)
    assert engine.damages[0].cause is None
    engine.end("reader", emitted)
    assert engine.damages[0].cause == cause


def test_a_block_more_fills_the_one_before_for_each_damage_that_its_request_read(engine: Engine) -> None:
    engine.elsewhere = "a tier"
    engine.begin("other", [5])
    engine.begin("reader", [1, 2], prompt=8)
    engine.forward()
    engine.patrolled = dict.fromkeys(range(4 * SIZE), 1)
    engine.grow("reader", [3])
    engine.forward()
    engine.find(1)
    engine.find(2)
    engine.find(5)
    assert [one.cause for one in engine.damages] == [None] * 3
    engine.forward(4)
    grown = GrownBlocks(["reader"], [4], [3], [12])
    engine.tracker.follow(ChangedRequests(grown={"0": grown}), engine.step)
    assert [one.cause for one in engine.damages] == [STORED, STORED, None]


def test_what_a_reader_filled_before_is_stored_as_it_should_be(engine: Engine) -> None:
    engine.elsewhere = "a tier"
    engine.begin("reader", [1, 2, 3], prompt=11)
    engine.forward()
    engine.grow("reader", [4])
    engine.forward()
    engine.find(4)
    assert engine.damages[0].cause is None


def test_a_copy_makes_nothing_doubtful_that_a_listed_request_sent_before(engine: Engine) -> None:
    engine.elsewhere = "a tier"
    engine.begin("reader", [1])
    engine.forward()
    engine.grow("reader", [2])
    engine.forward()
    engine.patrolled[1 * SIZE + 1] = 1
    engine.grow("reader", [3])
    engine.find(1)
    (reached,) = engine.tracker.reached()
    assert engine.damages[0].cause == STORED
    assert reached.readers == (("reader", 2),)
    engine.damages[0].doubt("graver")
    assert engine.damages[0].cause == "graver"
