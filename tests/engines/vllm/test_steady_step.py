"""An output counts as steady only if it says nothing that has to be followed."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.toolkit.later import Later
from canary_obs.engines.vllm.pool_events import (
    EventsLost,
    Loaded,
    LoadTokens,
    Partial,
    Published,
    PublishedRun,
)
from canary_obs.engines.vllm.prefix_hits import HITS_ATTRIBUTE, HitBlocks
from canary_obs.engines.vllm.steady_step import Change, SteadyStep

HITS = HitBlocks((0,), (0,))


def output(**changed: Any) -> Any:
    cached = {"new_block_ids": [None, None], "resumed_req_ids": set()}
    plain = {
        "scheduled_new_reqs": [], "finished_req_ids": set(), "preempted_req_ids": None,
        "new_block_ids_to_zero": None, "kv_cache_block_copies": None, HITS_ATTRIBUTE: HITS,
    }  # fmt: skip
    own = {name: value for name, value in changed.items() if name not in cached}
    given = SimpleNamespace(**(cached | {name: changed[name] for name in changed if name in cached}))
    return SimpleNamespace(**(plain | own), scheduled_cached_reqs=given)


def steady(*, scales: bool = False, loads: bool = False, states: bool = False) -> SteadyStep:
    blocks: Any = SimpleNamespace(groups=["state"] if states else [], go_on=lambda _: False)
    sources: list[Any] = ["scale"] if scales else []
    given: Any = SimpleNamespace(open=loads)
    made = SteadyStep(blocks, given, sources)
    made.followed(output())
    return made


def test_an_output_that_says_nothing_is_steady() -> None:
    assert steady().change(output(), ()) is Change.NOTHING


def test_an_output_that_came_from_another_process_is_steady() -> None:
    """As with tensor parallelism: what it carries equals what the last one carried, and is another object."""
    made = steady()
    assert made.change(pickle.loads(pickle.dumps(output())), ()) is Change.NOTHING
    grown = output(**{HITS_ATTRIBUTE: HitBlocks((0,), (2,))})
    assert made.change(pickle.loads(pickle.dumps(grown)), ()) is Change.OTHER
    made.followed(grown)
    after = output(**{HITS_ATTRIBUTE: HitBlocks((2,), (2,))})
    assert made.change(pickle.loads(pickle.dumps(after)), ()) is Change.OTHER


@pytest.mark.parametrize(
    "changed",
    [
        {"scheduled_new_reqs": ["a"]}, {"finished_req_ids": {"a"}}, {"preempted_req_ids": {"a"}},
        {"new_block_ids_to_zero": [3]}, {"kv_cache_block_copies": [(1, 2)]}, {"resumed_req_ids": {"a"}},
        {"new_block_ids": [None, ([7],)]}, {HITS_ATTRIBUTE: HitBlocks((0,), (1,))}, {HITS_ATTRIBUTE: None},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_an_output_says_is_followed(changed: dict[str, Any]) -> None:
    assert steady().change(output(**changed), ()) is not Change.NOTHING


def test_events_of_the_pool_are_followed() -> None:
    assert steady().change(output(), (Published(0, 1, 0, -1, 4),)) is not Change.NOTHING
    assert steady().change(output(), None) is not Change.NOTHING  # nobody reports them


def test_the_first_output_is_followed_and_so_is_one_without_a_count() -> None:
    made = SteadyStep(SimpleNamespace(groups=[]), SimpleNamespace(open=False), [])  # type: ignore[arg-type]
    assert made.change(output(), ()) is not Change.NOTHING
    made.followed(output(**{HITS_ATTRIBUTE: None}))
    assert made.change(output(**{HITS_ATTRIBUTE: None}), ()) is not Change.NOTHING


@pytest.mark.parametrize("what", ["scales", "loads", "states"])
def test_what_changes_by_itself_is_followed_in_every_step(what: str) -> None:
    assert steady(**{what: True}).change(output(), ()) is not Change.NOTHING


GROWN: dict[str, Any] = {"new_block_ids": [None, ([7],)]}
OF_BLOCKS = 5, Published(0, 1, 0, -1, 4), PublishedRun(0, (1, 2), 0, -1, 4), Partial(0, 1, 0, 3)


def test_an_output_that_gives_blocks_grows() -> None:
    assert steady().change(output(**GROWN), OF_BLOCKS) is Change.GROWTH
    assert steady().change(output(**GROWN), ()) is Change.GROWTH
    assert steady(states=True).change(output(**GROWN), OF_BLOCKS) is Change.OTHER, "states move to them"


@pytest.mark.parametrize(
    "event",
    [Loaded(0, (1,), 0, 0, 4, "a"), LoadTokens("a", Later(lambda: b"")), EventsLost(1), None],
    ids=lambda event: type(event).__name__,  # an address differs from worker to worker
)
def test_what_a_load_brings_or_nobody_knows_is_followed(event: Any) -> None:
    assert steady().change(output(**GROWN), (*OF_BLOCKS, event)) is Change.OTHER
    assert steady().change(output(**GROWN), None) is Change.OTHER


@pytest.mark.parametrize("what", ["scales", "loads", "states"])
@pytest.mark.parametrize("changed", [{"scheduled_new_reqs": ["a"]}, {HITS_ATTRIBUTE: HitBlocks((0,), (1,))}])
def test_an_output_that_says_more_than_blocks_is_followed(changed: dict[str, Any], what: str) -> None:
    assert steady().change(output(**GROWN, **changed), ()) is Change.OTHER
    assert steady(**{what: True}).change(output(**GROWN), ()) is Change.OTHER
