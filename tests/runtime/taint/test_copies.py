"""KV computed from damage that may be stored in a lower tier, and come back from there."""

from __future__ import annotations

import numpy as np
import pytest

from canary_obs.engine_api.requests import ChangedRequests, GrownBlocks, KeyedBlocks, StoredIn
from tests.runtime.taint.test_tracker import SIZE, Engine

STORED = "KV computed from it may be stored in a tier: who loads that is not listed"


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_what_a_reader_filled_whole_may_be_loaded_again_by_others(engine: Engine) -> None:
    engine.begin("writer", [1])
    engine.forward()
    engine.find(1)
    engine.elsewhere = StoredIn("a tier", whole=True)
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
    engine.elsewhere = StoredIn("a tier", whole=True)
    engine.begin("reader", [1])
    engine.forward()
    engine.find(1)
    assert engine.damages[0].cause is None
    engine.end("reader", emitted)
    assert engine.damages[0].cause == cause


def test_a_block_more_fills_the_one_before_for_each_damage_that_its_request_read(engine: Engine) -> None:
    engine.elsewhere = StoredIn("a tier", whole=True)
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
    engine.elsewhere = StoredIn("a tier", whole=True)
    engine.begin("reader", [1, 2, 3], prompt=11)
    engine.forward()
    engine.grow("reader", [4])
    engine.forward()
    engine.find(4)
    assert engine.damages[0].cause is None


def test_a_copy_makes_nothing_doubtful_that_a_listed_request_sent_before(engine: Engine) -> None:
    engine.elsewhere = StoredIn("a tier", whole=True)
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


def keyed(*blocks: int, name: str = "") -> dict[str, KeyedBlocks]:
    """Blocks under keys that are made of their numbers and a name."""
    keys = [f"{name}{place}".encode() for place in range(len(blocks))]
    return {"0": KeyedBlocks(keys, np.array(blocks))}


def store(engine: Engine, *blocks: int, name: str = "") -> None:
    engine.tracker.follow(ChangedRequests(stored=keyed(*blocks, name=name)), engine.step)


def load(engine: Engine, *blocks: int, name: str = "") -> None:
    engine.tracker.follow(ChangedRequests(loaded=keyed(*blocks, name=name)), engine.step)


def read_and_store(engine: Engine) -> None:
    """A request fills a block from damage in another one, and a copy of it is stored."""
    engine.begin("writer", [1])
    engine.forward()
    engine.end("writer", 1)
    engine.patrolled[1 * SIZE + 1] = 1
    engine.begin("reader", [1, 2], joined=1)
    engine.begin("apart", [3])
    engine.forward()
    engine.end("reader", 1)
    engine.end("apart", 1)
    store(engine, 2, 3)


@pytest.mark.parametrize("found", ["before", "between", "after"])
def test_who_joins_a_copy_of_what_a_reader_filled_is_listed(engine: Engine, found: str) -> None:
    read_and_store(engine)
    engine.begin("fills them anew", [2, 3])
    engine.forward()
    if found == "before":
        engine.find(1)
    load(engine, 7, 8)
    if found == "between":
        engine.find(1)
    engine.begin("joins the copy", [7, 9], joined=1)
    engine.begin("joins the other", [8, 10], joined=1)
    engine.forward()
    engine.begin("joins what was computed from it", [9, 11], joined=1)
    if found == "after":
        engine.find(1)
    listed = {"reader": (2, False), "joins the copy": (4, True), "joins what was computed from it": (5, True)}
    assert engine.tainted() == listed
    engine.begin("later", [7, 12], joined=1)
    assert engine.tainted() == listed | {"later": (5, True)}
    engine.forward()
    engine.begin("fills it anew", [7])
    engine.forward()
    engine.begin("joins that", [7, 13], joined=1)
    assert engine.tainted() == listed | {"later": (5, True)}


@pytest.mark.parametrize("found", [False, True])
def test_a_copy_of_a_copy_is_followed_to_who_filled_it(engine: Engine, found: bool) -> None:
    read_and_store(engine)
    load(engine, 7, 8)
    engine.forward()
    store(engine, 8, 7, name="again")
    engine.begin("fills it anew", [7, 8])
    engine.forward()
    if found:
        engine.find(1)
    load(engine, 20, 21, name="again")
    engine.begin("joins a copy of it", [21, 22], joined=1)
    engine.begin("joins a copy of the other", [20, 23], joined=1)
    engine.forward()
    if not found:
        engine.find(1)
    assert set(engine.tainted()) == {"reader", "joins a copy of it"}


def test_a_copy_that_is_written_over_by_another_is_joined_no_more(engine: Engine) -> None:
    read_and_store(engine)
    load(engine, 7, 8)
    engine.forward()
    load(engine, 8, 7)
    engine.begin("joins the other", [7, 9], joined=1)
    engine.forward()
    engine.find(1)
    assert set(engine.tainted()) == {"reader"}


@pytest.mark.parametrize("loads", [False, True])
def test_copies_that_are_forgotten_are_never_nobody(engine: Engine, loads: bool) -> None:
    stored = engine.tracker.readers.stored["0"]
    stored._kept = 2
    read_and_store(engine)
    if loads:
        load(engine, 7, 8)
        load(engine, 9)
    engine.forward()
    engine.find(1, incident="before")
    assert (engine.damages[-1].cause is None) is not loads
    store(engine, 3, name="more")
    engine.find(1, incident="after")
    assert "are forgotten" in str(engine.damages[-1].cause)


def test_what_a_reader_had_filled_before_it_read_damage_is_joined_from_a_copy_by_nobody_tainted(
    engine: Engine,
) -> None:
    engine.begin("reader", [1, 2])
    engine.forward()
    engine.grow("reader", [3])
    engine.forward()
    engine.end("reader", 1)
    store(engine, 1, 2)
    engine.find(3)
    load(engine, 7, 8)
    engine.begin("joins a copy", [7, 9], joined=1)
    assert set(engine.tainted()) == {"reader"}


def test_a_part_of_a_block_may_be_stored_as_soon_as_it_is_read(engine: Engine) -> None:
    engine.elsewhere = StoredIn("a tier", whole=False)
    engine.begin("reader", [1])
    engine.forward()
    engine.find(1)
    assert engine.damages[0].cause == STORED


def test_drafted_tokens_may_have_filled_the_last_block(engine: Engine) -> None:
    engine.elsewhere = StoredIn("a tier", whole=True)
    engine.tracker.follow(ChangedRequests(rewrites=True), 0)
    engine.begin("reader", [1])
    engine.forward()
    engine.find(1)
    assert engine.damages[0].cause is None
    engine.end("reader", 1)
    assert engine.damages[0].cause == STORED
