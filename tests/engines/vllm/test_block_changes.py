"""What a scheduler output changes in the bytes of blocks; with a real engine: real/test_left_out.py."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch

from canary_obs.engines.vllm.block_changes import BlockChanges
from canary_obs.engines.vllm.pool_events import Loaded

SIZE = 2


class Recorder:
    """Keeps the blocks whose slots are announced as invalidated."""

    def __init__(self) -> None:
        self.invalid: list[tuple[str, list[int]]] = []

    def invalidated(self, name: str, slots: torch.Tensor) -> None:
        self.invalid.append((name, sorted(set((slots // SIZE).tolist()))))

    def __getattr__(self, hook: str) -> Any:
        return lambda *_: None


def output(new: list[tuple[list[int], ...]] = (), grown: list[Any] = ()) -> Any:  # type: ignore[assignment]
    """A scheduler output; blocks by vLLM's group number, of each request."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=f"new{number}", num_computed_tokens=0, block_ids=blocks)
            for number, blocks in enumerate(new)
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[f"old{number}" for number in range(len(grown))],
            num_computed_tokens=[0] * len(grown), new_block_ids=list(grown), resumed_req_ids=set(),
        ),
        finished_req_ids=set(), preempted_req_ids=None, new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
    )  # fmt: skip


def changes(numbers: range = range(2)) -> BlockChanges:
    own = SimpleNamespace(
        view=SimpleNamespace(name="full"),
        number=0,
        num_blocks=16,
        block_size=SIZE,
        block_slots=SIZE,
        states=False,
        of_tokens=True,
    )
    return BlockChanges([own], torch.device("cpu"), numbers)  # type: ignore[list-item]


def invalid(given: Any, events: Any = None, numbers: range = range(2)) -> list[tuple[str, list[int]]]:
    seen = Recorder()
    changes(numbers).report(given, events, seen)  # type: ignore[arg-type]
    return seen.invalid


def test_a_block_handed_to_a_group_left_out_ends_the_records_of_the_others() -> None:
    assert invalid(output(new=[([1, 3], [0, 4])])) == [("full", [4])]
    assert invalid(output(grown=[None, ([6], [0, 7, 5])])) == [("full", [5, 7])]


def test_blocks_of_the_own_group_and_null_blocks_end_nothing() -> None:
    assert invalid(output(new=[([1, 3], [0])])) == []


def test_what_a_connector_fills_in_a_group_left_out_ends_records_before_its_request_is_scheduled() -> None:
    load = Loaded(1, (9,), 0, 0, SIZE, "waiting")
    assert invalid(output(), [load]) == [("full", [9])]
    assert invalid(output(), [Loaded(0, (8,), 0, 0, SIZE, "waiting")]) == []


def test_one_group_alone_shares_its_blocks_with_nobody() -> None:
    assert invalid(output(new=[([1, 3],)]), numbers=range(1)) == []


def states(number: int = 1) -> Any:
    return SimpleNamespace(
        view=SimpleNamespace(name="state"), number=number, num_blocks=16, block_size=4, block_slots=1,
        states=True, of_tokens=False, state_tokens=4,
    )  # fmt: skip


def _plain(given: Any) -> Any:
    return given.tolist() if isinstance(given, torch.Tensor) else given


class Calls:
    """The hooks that are called, in order."""

    state_interval, adoptions = 1, 0

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __getattr__(self, hook: str) -> Any:
        return lambda name, *slots: self.seen.append((hook, name, *(_plain(part) for part in slots)))


def test_copies_and_checkpoints_of_states_are_announced_after_blocks_changed_hands() -> None:
    given, seen = BlockChanges([states()], torch.device("cpu"), range(2)), Calls()
    new = SimpleNamespace(req_id="a", num_computed_tokens=4, block_ids=([], [3, 5, 7]))
    first = output()
    first.scheduled_new_reqs, first.num_scheduled_tokens = [new], {"a": 8}
    first.new_block_ids_to_zero = [7]
    given.report(first, (), seen)  # type: ignore[arg-type]
    assert [call for call in seen.seen if call[0] != "hit"] == [
        ("before_load", "state", [7]), ("invalidated", "state", [7]), ("copied", "state", [3], [7]),
        ("awaited", "state", [5]),
    ]  # fmt: skip
    seen.seen.clear()
    given.end_step(seen)  # type: ignore[arg-type]
    given.end_step(seen)  # type: ignore[arg-type]
    assert seen.seen == [("received", "state", [5])]


def test_of_a_copy_that_a_forward_goes_on_with_unshown_no_record_is_left_after_it() -> None:
    given, seen = BlockChanges([states()], torch.device("cpu"), range(2)), Calls()
    seen.state_interval = 8
    for count, blocks in ((6, [0, 5]), (7, None), (8, [9])):
        step = output()
        step.num_scheduled_tokens = {"a": 1}
        if count == 6:
            new = SimpleNamespace(req_id="a", num_computed_tokens=count, block_ids=([], blocks))
            step.scheduled_new_reqs = [new]
        else:
            step.scheduled_cached_reqs = SimpleNamespace(
                req_ids=["a"], num_computed_tokens=[count], resumed_req_ids=set(),
                new_block_ids=[None if blocks is None else ([], blocks)],
            )  # fmt: skip
        seen.seen.clear()
        given.report(step, (), seen)  # type: ignore[arg-type]
        seen.seen.append(("forward",))
        given.end_step(seen)  # type: ignore[arg-type]
    assert [call for call in seen.seen if call[0] != "hit"] == [
        ("copied", "state", [5], [9]), ("forward",), ("awaited", "state", [9])
    ]  # fmt: skip


def test_slots_are_there_until_the_side_stream_has_read_them() -> None:
    """The engine's stream, which waits for it at the next step, would give their memory away."""
    given, first, kept = BlockChanges([states()], torch.device("cpu"), range(2)), output(), []
    first.scheduled_new_reqs = [SimpleNamespace(req_id="a", num_computed_tokens=0, block_ids=([], [5, 7]))]
    first.num_scheduled_tokens = {"a": 8}
    given.report(first, (), Calls())  # type: ignore[arg-type]
    keeps = SimpleNamespace(received=lambda _, slots: kept.append(weakref.ref(slots)))
    given.end_step(keeps)  # type: ignore[arg-type]
    (slots,) = kept
    assert slots() is not None


def test_what_a_step_that_failed_should_have_left_gets_no_baseline() -> None:
    given, seen = BlockChanges([states()], torch.device("cpu"), range(2)), Calls()
    first, second = output(), output()
    first.scheduled_new_reqs = [SimpleNamespace(req_id="a", num_computed_tokens=0, block_ids=([], [5, 7]))]
    first.num_scheduled_tokens, second.num_scheduled_tokens = {"a": 8}, {}
    given.report(first, (), seen)  # type: ignore[arg-type]
    given.report(second, (), seen)  # type: ignore[arg-type]
    given.end_step(seen)  # type: ignore[arg-type]
    assert "received" not in {call[0] for call in seen.seen}


def test_a_state_that_a_connector_fills_is_awaited() -> None:
    given, seen = BlockChanges([states()], torch.device("cpu"), range(2)), Calls()
    nothing = output()
    nothing.num_scheduled_tokens = {}
    given.report(nothing, [Loaded(1, (9,), 0, 0, 4, "waiting")], seen)  # type: ignore[arg-type]
    given.loads.begin_due(seen)  # type: ignore[arg-type]
    assert [call[:2] for call in seen.seen] == [("before_load", "state"), ("load_begun", "waiting")]


def test_what_a_copy_of_a_block_is_written_over_is_compared_before() -> None:
    seen, given = Calls(), output()
    given.kv_cache_block_copies = [(3, 5)]
    changes().report(given, (), seen)  # type: ignore[arg-type]
    assert [call for call in seen.seen if call[0] != "hit"] == [
        ("before_load", "full", [10, 11]), ("copied", "full", [6, 7], [10, 11])
    ]  # fmt: skip


def test_who_gets_blocks_is_noted_of_an_output_that_failed_too() -> None:
    given = BlockChanges([states()], torch.device("cpu"), range(2), empty=True)
    failed = output(new=[([3, 4], [0, 5, 7])])
    failed.num_scheduled_tokens, failed.total_num_scheduled_tokens = {"new0": 8}, 8
    given.assign(failed, [Loaded(0, (9,), 0, 0, SIZE, "waiting")])
    assert [given.owners.foreign(number).tolist() for number in range(2)] == [
        [block for block in range(16) if block not in own] for own in ((3, 4, 9), (5, 7))
    ]
    assert given.states.left_out == 1
