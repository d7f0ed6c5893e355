"""States of linear attention in memory of the adapter's own, and those left for the prefix cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_kernels.hashing import chain_of
from canary_obs.engines.sglang.device_states import DeviceStates, TrackedStates
from canary_obs.engines.sglang.state_hooks import StateHooks
from canary_obs.engines.toolkit.method_patches import MethodPatches
from tests.engines.sglang.test_states import TYPES, InOrder, Pool, Watching

ARGUMENTS = SimpleNamespace(mamba_cache_chunk_size=64, mamba_track_interval=16)


def request(slot: int | None) -> Any:
    """As of SGLang 0.5.16: the slot is the request's own, not that of its KV."""
    return SimpleNamespace(kv=SimpleNamespace(), mamba_pool_idx=None if slot is None else torch.tensor(slot))


@pytest.fixture
def rows() -> torch.Tensor:
    """Of the request table: row 5 has state 3, row 2 has state 7."""
    rows = torch.zeros(8, dtype=torch.int32)
    rows[5], rows[2] = 3, 7
    return rows


def test_a_record_goes_where_the_scheduler_says_and_is_read_where_the_layers_look(rows: torch.Tensor) -> None:
    states, names = DeviceStates(rows, TYPES), ["a", "b"]
    requests, places = [request(3), request(7)], torch.tensor([5, 2])
    states.keep(places, requests, names, decodes=True)
    first = states.last
    assert first.out_slots.tolist() == [3, 7]
    assert first.slot_table.tolist() == [[3], [7]]
    rows[5] = 7  # the layers are led to another request's
    states.keep(places, requests, names, decodes=True)
    assert states.last is first  # the next forward of these requests has the same tensors
    assert first.slot_table.tolist() == [[7], [7]]
    assert first.out_slots.tolist() == [3, 7]
    tokens = first.tokens
    assert tokens is not None
    assert tokens.known_lens is not None
    assert tokens.known_digests is not None
    assert (tokens.prefix_lens.tolist(), tokens.extend_lens.tolist()) == ([0, 0], [1, 1])
    assert tokens.known_lens.tolist() == [1, 1]
    for number, digest in zip(tokens.input_ids.tolist(), tokens.known_digests.tolist(), strict=True):
        assert int(chain_of(torch.tensor([number]))[-1]) == digest
    assert len(set(tokens.input_ids.tolist())) == 2


def test_a_request_that_comes_back_has_another_state(rows: torch.Tensor) -> None:
    states, names = DeviceStates(rows, TYPES), ["a"]
    for slot in (3, 6):
        states.keep(torch.tensor([5]), [request(slot)], names, decodes=True)
    assert states.last.out_slots.tolist() == [6]


def test_a_request_without_a_state_is_no_view(rows: torch.Tensor) -> None:
    states = DeviceStates(rows, TYPES)
    with pytest.raises(LookupError, match="SGLang runs 1 of 2 requests without a state"):
        states.keep(torch.tensor([5, 2]), [request(3), request(None)], ["a", "b"], decodes=True)


def batch(
    *, decodes: bool, lens: list[int], extends: list[int], tracked: list[int], mask: bool = True
) -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: decodes),
        seq_lens_cpu=torch.tensor(lens),
        extend_seq_lens_cpu=extends,
        mamba_track_mask=torch.ones(len(lens), dtype=torch.bool) if mask else None,
        mamba_track_indices=torch.tensor(tracked),
    )


# Of a rank whose attention waits for another's: it has no requests, and no view.
IDLE: Any = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: False), mamba_track_mask=None)


class Engine:
    """Two requests, whose states are 3 and 7, with what is announced of them."""

    def __init__(self, rows: torch.Tensor, interval: int = 1) -> None:
        self.states, pool = DeviceStates(rows, TYPES), Pool()
        self.tracked, self.calls = TrackedStates(ARGUMENTS, self.states), pool.calls
        self.requests, self.names = [request(3), request(7)], ["a", "b"]
        self.fails = False
        self.req_to_token_pool = SimpleNamespace(mamba_pool=pool)
        self.observer = observer = Watching(pool.calls)
        observer.state_interval = interval
        StateHooks(self, observer, InOrder(pool.calls), self).wrap(MethodPatches())  # type: ignore[arg-type]

    def _maybe_execute_deferred_mamba_cow_and_clear(self, batch: Any) -> None:
        """Nothing is cleared or copied."""

    def forward(self, batch: Any) -> str:
        if batch is not IDLE:
            decodes = batch.forward_mode.is_decode()
            self.states.keep(torch.tensor([5, 2]), self.requests, self.names, decodes=decodes)
        self.calls.append(("forward", self.states.shown))
        if self.fails:
            raise MemoryError
        return "answer"


def ran(rows: torch.Tensor, given: Any, *, fails: bool = False) -> tuple[list[Any], TrackedStates]:
    """What a forward announces of what it leaves."""
    engine = Engine(rows)
    engine.fails = fails
    if fails:
        with pytest.raises(MemoryError):
            engine.forward(given)
    else:
        assert engine.forward(given) == "answer"
    return engine.calls, engine.tracked


BEFORE = ("before_load", "state", [6]), ("invalidated", "state", [6]), ("wait",), ("forward", True)


def test_a_decode_copies_the_states_of_requests_at_the_interval(rows: torch.Tensor) -> None:
    calls, tracked = ran(rows, batch(decodes=True, lens=[31, 32], extends=[], tracked=[5, 6]))
    assert calls == [*BEFORE, ("copied", "state", [7], [6])]
    assert tracked.shown == 0


def test_a_prompt_leaves_the_state_of_its_last_whole_chunk_which_is_a_forward_of_its_own(
    rows: torch.Tensor,
) -> None:
    calls, tracked = ran(rows, batch(decodes=False, lens=[63, 70], extends=[63, 64], tracked=[5, 6]))
    assert calls[:4] == list(BEFORE)
    assert [name for name, *_ in calls[4:]] == ["before_write", "forward_launched", "after_forward"]
    view = calls[4][1]
    assert view is calls[5][1] is calls[6][1]
    assert (view.request_ids, view.rows.tolist(), list(view.groups)) == (["b"], [0], ["state"])
    step = view.groups["state"]
    assert (step.slot_table.tolist(), step.out_slots.tolist()) == ([[6]], [6])
    assert step.tokens.known_lens.tolist() == view.known_lens.tolist() == [1]
    assert int(chain_of(step.tokens.input_ids)[-1]) == int(step.tokens.known_digests[0])
    assert tracked.shown == 1  # SGLang does not count it


@pytest.mark.parametrize(
    "given",
    [
        batch(decodes=True, lens=[31, 33], extends=[], tracked=[5, 6]),
        batch(decodes=False, lens=[63, 63], extends=[63, 63], tracked=[5, 6]),
        batch(decodes=False, lens=[64, 64], extends=[64, 64], tracked=[5, 6], mask=False),
    ],
)
def test_a_forward_that_leaves_nothing(rows: torch.Tensor, given: Any) -> None:
    assert ran(rows, given)[0] == [("forward", True)]


def test_what_a_forward_that_failed_has_left_has_no_record(rows: torch.Tensor) -> None:
    calls, _ = ran(rows, batch(decodes=True, lens=[31, 32], extends=[], tracked=[5, 6]), fails=True)
    assert calls == list(BEFORE)


def decode(*, due: bool = False) -> Any:
    return batch(decodes=True, lens=[31, 32 if due else 33], extends=[], tracked=[5, 6])


PROMPT = batch(decodes=False, lens=[63, 63], extends=[63, 63], tracked=[5, 6])


def test_of_forwards_that_decode_the_same_requests_some_are_shown_without_their_states(
    rows: torch.Tensor,
) -> None:
    engine = Engine(rows, interval=3)
    for _ in range(5):
        engine.forward(decode())
    leave = ("before_load", "state", [3, 7]), ("awaited", "state", [3, 7])
    shown, other = ("forward", True), ("forward", False)
    assert engine.calls == [shown, *leave, other, other, shown, *leave, other]
    assert engine.states.left_out == 3
    engine.calls.clear()
    engine.names = ["a", "b"]  # others, or the same ones again after a prompt
    engine.forward(decode())
    engine.requests = [request(3), request(6)]
    engine.forward(decode())
    assert engine.calls == [shown, shown]
    assert engine.states.left_out == 3


def test_states_are_shown_again_when_records_were_declared_unknown(rows: torch.Tensor) -> None:
    """What is not shown would get a baseline, and change."""
    engine = Engine(rows, interval=8)
    for _ in range(3):
        engine.forward(decode())
    engine.calls.clear()
    engine.observer.adoptions = 5
    for _ in range(2):
        engine.forward(decode())
    assert [call for call in engine.calls if call[0] == "forward"] == [("forward", True), ("forward", False)]


def test_no_more_forwards_are_left_out_than_may_be(rows: torch.Tensor) -> None:
    """The scheduler counts forwards: those that should have been shown with states are missed."""
    engine = Engine(rows, interval=4)
    states = engine.states
    counted, before = 0, 100  # of a warm engine
    assert states.may_leave_out(before) == 0
    for _ in range(21):
        engine.forward(decode())
        counted += 1
        assert states.may_leave_out(before + counted) == states.left_out == counted - -(-counted // 4)
    states.left_out += 6  # as if none were shown any more
    assert states.may_leave_out(before + counted) == 15


def test_states_that_rest_while_a_prompt_is_computed_have_a_baseline(rows: torch.Tensor) -> None:
    engine = Engine(rows, interval=3)
    for _ in range(2):
        engine.forward(decode())
    engine.calls.clear()
    engine.forward(PROMPT)
    engine.forward(PROMPT)
    engine.forward(decode())
    shown = ("forward", True)
    assert engine.calls == [("received", "state", [3, 7]), shown, shown, shown]


def test_after_an_idle_forward_the_states_are_shown_again(rows: torch.Tensor) -> None:
    """They have a baseline, and what comes next overwrites them."""
    engine = Engine(rows, interval=3)
    for given in (decode(), decode(), IDLE, decode()):
        engine.forward(given)
    shown = ("forward", True)
    assert engine.calls[-3:] == [("received", "state", [3, 7]), shown, shown]


def test_states_that_have_a_record_rest_with_it(rows: torch.Tensor) -> None:
    engine = Engine(rows, interval=3)
    engine.forward(decode())
    engine.forward(PROMPT)
    assert engine.calls == [("forward", True)] * 2


def test_what_is_left_by_a_forward_that_is_shown_without_states_is_a_forward_of_its_own(
    rows: torch.Tensor,
) -> None:
    """There is no record that could be copied."""
    engine = Engine(rows, interval=3)
    engine.forward(decode())
    engine.calls.clear()
    engine.forward(decode(due=True))
    assert [name for name, *_ in engine.calls] == [
        "before_load", "invalidated", "wait", "before_load", "awaited", "forward",
        "before_write", "forward_launched", "after_forward",
    ]  # fmt: skip
    view = engine.calls[-1][1]
    assert (view.request_ids, view.groups["state"].out_slots.tolist()) == (["b"], [6])
    assert engine.tracked.shown == engine.states.left_out == 1


def test_states_that_the_prefix_cache_may_have_are_always_shown(rows: torch.Tensor) -> None:
    """Without buffers of their own, a request's state becomes the cache's when the request ends."""
    engine, states = Engine(rows), DeviceStates(rows, TYPES)
    alone, observer = SimpleNamespace(states=states, tracked=None), Watching([])
    observer.state_interval = 3
    StateHooks(engine, observer, InOrder([]), alone).wrap(MethodPatches())  # type: ignore[arg-type]
    assert states.every == 1
