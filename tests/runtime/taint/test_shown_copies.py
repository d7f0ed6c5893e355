"""Copies in a lower tier that are all shown: for whom they are loaded, and who joins them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from canary_obs.engine_api.requests import ChangedRequests, KeyedBlocks, StoredIn
from canary_obs.vocabulary import Phase, Reason
from tests.runtime.taint.test_copies import STORED, load, read_and_store, store
from tests.runtime.taint.test_tracker import Engine

SHOWN = StoredIn("a tier", whole=True, shown=True)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_where_all_copies_are_shown_nobody_is_missing(engine: Engine) -> None:
    engine.elsewhere = SHOWN
    read_and_store(engine)
    engine.begin("fills a whole block", [1, 4], joined=1)
    engine.forward()
    engine.grow("fills a whole block", [5])
    engine.find(1)
    assert engine.damages[0].cause is None


@pytest.mark.parametrize("found", [False, True])
def test_a_copy_of_what_a_request_began_with_is_followed_to_who_filled_it(
    engine: Engine, found: bool
) -> None:
    engine.elsewhere = SHOWN
    read_and_store(engine)
    load(engine, 7, 8)
    engine.begin("loader", [7, 9], loaded=1)
    engine.begin("loads the other", [8, 10], loaded=1)
    engine.forward()
    store(engine, 8, 7, name="again")
    if found:
        engine.find(1)
    load(engine, 20, 21, name="again")
    engine.begin("joins a copy of it", [21, 22], joined=1)
    engine.begin("joins a copy of the other", [20, 23], joined=1)
    engine.forward()
    if not found:
        engine.find(1)
    assert set(engine.tainted()) == {"reader", "loader", "joins a copy of it"}


@pytest.mark.parametrize("found", [False, True])
def test_a_request_that_begins_in_a_block_that_was_filled_since_its_load_reads_no_copy(
    engine: Engine, found: bool
) -> None:
    """What it begins with came from another connector."""
    engine.elsewhere = SHOWN
    read_and_store(engine)
    load(engine, 7)
    engine.forward()
    engine.begin("fills it", [7, 9])
    engine.forward()
    engine.end("fills it", 1)
    if found:
        engine.find(1)
    engine.begin("received", [7, 11], loaded=1)
    engine.forward()
    if not found:
        engine.find(1)
    assert set(engine.tainted()) == {"reader"}


def test_what_a_request_began_with_is_joined_until_its_block_is_filled_anew(engine: Engine) -> None:
    engine.elsewhere = SHOWN
    read_and_store(engine)
    load(engine, 7)
    engine.begin("loader", [7, 9], loaded=1)
    engine.forward()
    engine.end("loader", 1)
    engine.begin("fills it anew", [7])
    engine.forward()
    engine.begin("joins that", [7, 13], joined=1)
    engine.forward()
    engine.find(1)
    assert set(engine.tainted()) == {"reader", "loader"}


@pytest.mark.parametrize("found", ["before", "between", "after"])
def test_for_whom_a_copy_was_loaded_is_listed(engine: Engine, found: str) -> None:
    """Its load is under way for two forwards; vLLM counts what was loaded as filled by the request."""
    engine.elsewhere = SHOWN
    read_and_store(engine)
    if found == "before":
        engine.find(1)
    load(engine, 7, 8)
    engine.forward(2)
    if found == "between":
        engine.find(1)
    engine.begin("joins before it begins", [7, 20], joined=1)
    engine.forward()
    engine.begin("loader", [7, 9], loaded=1)
    engine.begin("loads the other", [8, 10], loaded=1)
    engine.begin("joins it with the loader", [7, 11], joined=1)
    engine.forward()
    if found == "after":
        engine.find(1)
    listed = {
        "reader": (2, False), "joins before it begins": (5, True), "loader": (6, True),
        "joins it with the loader": (6, True),
    }  # fmt: skip
    assert engine.tainted() == listed
    engine.begin("joins what the loader computed", [7, 9, 12], joined=2)
    engine.begin("fills it anew", [8])
    assert engine.tainted() == listed | {"joins what the loader computed": (7, True)}
    assert engine.damages[0].cause is None


@pytest.mark.parametrize("found", [False, True])
def test_a_clean_copy_in_a_block_that_held_damage_is_read_by_nobody_tainted(
    engine: Engine, found: bool
) -> None:
    engine.elsewhere = SHOWN
    read_and_store(engine)
    if found:
        engine.find(1)
    load(engine, 22, 2)  # what was apart from the damage, over what the reader filled
    engine.forward()
    if not found:
        engine.find(1)
    engine.begin("joins", [2, 20], joined=1)
    engine.begin("loader", [2, 21], loaded=1)
    assert set(engine.tainted()) == {"reader"}


@pytest.mark.parametrize("found", [False, True])
def test_a_block_that_is_given_to_others_as_it_is_stored(engine: Engine, found: bool) -> None:
    """The copy is made before the forward; the load of a request that never began is written over, too."""
    engine.elsewhere = SHOWN
    read_and_store(engine)
    if found:
        engine.find(1)
    load(engine, 7, 8)
    engine.begin("fills it", [7, 9])
    store(engine, 9, 7, name="flushed ")  # as they were before
    engine.forward()
    store(engine, 9, 7, name="later ")
    load(engine, 20, 21, name="flushed ")
    load(engine, 22, 23, name="later ")
    engine.forward()
    engine.begin("reads what was flushed", [21, 30], loaded=1)
    engine.begin("reads what was stored later", [23, 31], loaded=1)
    engine.begin("joins what was filled", [7, 32], joined=1)
    engine.forward()
    if not found:
        engine.find(1)
    assert set(engine.tainted()) == {"reader", "reads what was flushed"}


@pytest.mark.parametrize("lost", ["load", "store", "lives"])
def test_a_copy_of_which_nobody_knows_makes_it_unknown_who_reads(engine: Engine, lost: str) -> None:
    engine.elsewhere = SHOWN
    read_and_store(engine)
    engine.find(1)
    if lost == "store":
        engine.tracker.follow(ChangedRequests(stored={"0": KeyedBlocks([b""], np.array([5]))}), engine.step)
    elif lost == "lives":
        engine.tracker.readers.held["0"].keep(np.empty(0, dtype=np.int64))
    assert engine.damages[0].cause is None
    engine.tracker.pending = False
    if lost == "load":
        engine.tracker.follow(ChangedRequests(loaded={"0": KeyedBlocks([b""], np.array([7]))}), engine.step)
    else:
        load(engine, 7)
    assert (engine.damages[0].cause, engine.tracker.pending) == (STORED, True)
    if lost != "lives":
        engine.find(3)
        assert "are forgotten" in str(engine.damages[-1].cause), "it is as old as the load"


def test_what_was_stored_before_all_that_is_followed_was_computed_from_nothing_that_is(
    engine: Engine,
) -> None:
    engine.elsewhere = SHOWN
    read_and_store(engine)
    engine.find(1)
    load(engine, 7, name="another ")
    assert engine.damages[0].cause is None


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"phase": Phase.TAIL}, None), ({"phase": Phase.HEAD}, None),
        ({"phase": Phase.HEAD, "peer": "host"}, STORED), ({"reason": Reason.LOST_WRITE}, STORED),
        ({"reason": Reason.CHAIN, "phase": Phase.HEAD}, STORED),
    ],
)  # fmt: skip
def test_copies_of_damage_that_no_load_would_find(
    engine: Engine, row: dict[str, Any], cause: str | None
) -> None:
    engine.elsewhere = SHOWN
    engine.begin("reader", [1])
    engine.forward()
    engine.find(1, request="reader", **row)
    assert engine.damages[0].cause == cause
