"""Which states forwards rewrite, copy and leave; with a real hybrid: real/test_states.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_kernels.hashing import chain_of
from canary_obs.engine_api.views import StepTypes
from canary_obs.engines.vllm.state_specs import keeps_states, tokens_per_state
from canary_obs.engines.vllm.states import StateBlocks, StateChanges, StateSteps
from canary_obs.errors import UnsupportedEngine

CPU = torch.device("cpu")
TYPES = StepTypes(
    slot_table=torch.int32, rows=torch.int64, lengths=torch.int32, input_ids=torch.int32,
    positions=torch.int64, out_slots=torch.int64, has_digests=True, expected_ids=None,
)  # fmt: skip


def group(tokens: int | None = 4) -> Any:
    return SimpleNamespace(view=SimpleNamespace(name="state"), number=1, state_tokens=tokens)


def output(
    scheduled: dict[str, int], new: Any = (), cached: Any = (), ended: str = "", resumed: str = ""
) -> Any:
    """new: (request, computed, blocks of group 1); cached: (request, computed, new blocks or None)."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, finished_req_ids=set(ended), preempted_req_ids=None,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=count, block_ids=([], blocks))
            for name, count, blocks in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached], num_computed_tokens=[count for _, count, _ in cached],
            new_block_ids=[None if added is None else ([], added) for _, _, added in cached],
            resumed_req_ids=set(resumed),
        ),
    )  # fmt: skip


def follow(blocks: StateBlocks, given: Any, interval: int = 1, adoptions: int = 0) -> Any:
    observer: Any = SimpleNamespace(state_interval=interval, adoptions=adoptions)
    return blocks.follow(given, observer)


def moved(
    sources: Any = (), destinations: Any = (), checkpoints: Any = (), rested: Any = (), rewritten: Any = (),
    left: Any = (), passed: Any = (),
) -> dict[str, StateChanges[list[int]]]:  # fmt: skip
    given = sources, destinations, checkpoints, rested, rewritten, left, passed
    return {"state": StateChanges(*map(list, given))}


def test_a_state_moves_where_its_next_token_lies_in_another_block() -> None:
    blocks = StateBlocks([group()])
    assert follow(blocks, output({"a": 3}, new=[("a", 0, [6])])) == {}
    assert follow(blocks, output({"a": 1}, cached=[("a", 3, None)])) == {}
    assert follow(blocks, output({"a": 1}, cached=[("a", 4, [8])])) == moved([6], [8])
    assert follow(blocks, output({"a": 1}, cached=[("a", 5, None)])) == {}


def test_a_state_from_the_prefix_cache_is_copied_to_the_requests_own_block() -> None:
    blocks = StateBlocks([group()])
    found = follow(blocks, output({"a": 2}, new=[("a", 8, [0, 5, 9])]))
    assert found == moved([5], [9])


def test_a_prefill_over_several_blocks_leaves_a_state_before_its_last_block() -> None:
    blocks = StateBlocks([group()])
    assert follow(blocks, output({"a": 10}, new=[("a", 0, [0, 4, 7])])) == moved([], [], [4], left=[4])
    assert follow(blocks, output({"b": 10}, new=[("b", 0, [0, 0, 7])])) == {}  # none was asked for


@pytest.mark.parametrize("end", [{"ended": "a"}, {"resumed": "a"}])
def test_a_request_that_ended_or_starts_anew_is_forgotten(end: dict[str, str]) -> None:
    blocks = StateBlocks([group()])
    follow(blocks, output({"a": 6}, new=[("a", 0, [6, 8])]))
    if "ended" in end:
        follow(blocks, output({}, **end))
        again = output({"a": 2}, new=[("a", 0, [9])])
    else:
        again = output({"a": 2}, cached=[("a", 0, [9])], **end)
    assert follow(blocks, again) == {}
    assert follow(blocks, output({"a": 3}, cached=[("a", 2, [3])])) == moved([9], [3])


def test_states_that_stay_in_their_block_are_not_followed() -> None:
    assert follow(StateBlocks([group(None)]), output({"a": 9}, new=[("a", 4, [3])])) == {}


def state_steps(own: Any, *outputs: Any, requests: int = 3) -> tuple[StateSteps, StateBlocks]:
    blocks = StateBlocks([own])
    for each in outputs:
        follow(blocks, each)
    return StateSteps([own], blocks, TYPES, (requests, CPU)), blocks


def test_each_request_rewrites_the_state_in_the_block_of_its_last_token() -> None:
    first = output({"a": 5, "b": 4}, new=[("a", 0, [3, 1, 5]), ("b", 0, [2, 7, 6])])
    steps, blocks = state_steps(group(), first)
    table = torch.tensor([[3, 1, 5], [2, 7, 6], [0, 0, 0]], dtype=torch.int32)
    lens = torch.tensor([0, 0], dtype=torch.int32), torch.tensor([5, 4], dtype=torch.int32)
    step = steps.steps(["a", "b"], {1: table}, *lens)["state"]
    assert step.out_slots.tolist() == [1, 2]
    assert step.slot_table[:2].tolist() == [[1], [2]]
    assert step.tokens is not None
    assert step.tokens.prefix_lens.tolist() == [0, 0]
    assert step.tokens.extend_lens.tolist() == [1, 1]
    assert step.tokens.token_starts.tolist() == [0, 1, 2]
    assert step.tokens.digests is not None
    anchor = int(chain_of(torch.empty(0, dtype=torch.int64))[-1])
    assert step.tokens.digests.tolist() == [anchor, anchor]
    follow(blocks, output({"a": 4, "b": 1}, cached=[("a", 5, None), ("b", 4, None)]))
    lens[0].add_(4)
    assert steps.steps(["a", "b"], {1: table}, *lens)["state"] is step  # no allocation
    assert step.out_slots.tolist() == [5, 7]


def known(step: Any) -> list[int]:
    """The numbers that records are to hold; what is looked for is their digest."""
    ids: list[int] = step.tokens.input_ids.tolist()
    chains = [int(chain_of(torch.tensor([number]))[-1]) for number in ids]
    assert step.tokens.known_digests.tolist() == chains
    return ids


def test_a_record_goes_where_the_scheduler_says_and_is_looked_for_where_the_table_leads() -> None:
    first = output({"a": 2, "b": 2}, new=[("a", 0, [3]), ("b", 0, [2])])
    steps, blocks = state_steps(group(), first)
    table = torch.tensor([[2], [3]], dtype=torch.int32)  # exchanged
    lens = torch.tensor([0, 0]), torch.tensor([2, 2])
    step = steps.steps(["a", "b"], {1: table}, *lens)["state"]
    assert step.out_slots.tolist() == [3, 2]
    assert step.slot_table[:2].tolist() == [[2], [3]]
    one, other = known(step)
    assert one != other
    steps.steps(["b", "a"], {1: table}, *lens)
    assert step.out_slots.tolist() == [2, 3]
    assert known(step) == [other, one]
    follow(blocks, output({"c": 2}, new=[("c", 0, [5])], ended="b"))
    step = steps.steps(["c", "a"], {1: table}, *lens)["state"]
    assert step.out_slots.tolist() == [5, 3]
    assert known(step)[1] == one
    assert step.tokens is not None
    assert step.tokens.known_lens is not None
    assert step.tokens.known_lens.tolist() == [1, 1]


def test_nothing_is_looked_for_of_a_request_whose_blocks_are_not_known() -> None:
    steps, _ = state_steps(group(), output({"a": 2}, new=[("a", 0, [3])]))
    table, lens = torch.tensor([[2], [3]], dtype=torch.int32), torch.tensor([1, 1])
    step = steps.steps(["b", "a"], {1: table}, lens, lens)["state"]
    assert step.out_slots.tolist() == [-1, 3]
    assert step.tokens is not None
    assert step.tokens.known_lens is not None
    assert step.tokens.known_lens.tolist() == [-1, 1]


def test_nothing_is_sent_to_the_device_while_requests_stay_in_their_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, blocks = state_steps(group(), output({"a": 1}, new=[("a", 0, [3])]))
    table, lens = torch.tensor([[3]], dtype=torch.int32), torch.tensor([1])
    steps.steps(["a"], {1: table}, lens, lens)
    monkeypatch.setattr(steps, "_give", lambda _: pytest.fail("sent"))
    follow(blocks, output({"a": 1}, cached=[("a", 1, None)]))
    steps.steps(["a"], {1: table}, lens, lens)


def test_a_state_for_the_whole_request_stays_in_its_first_block() -> None:
    steps, _ = state_steps(group(None), output({"a": 900}, new=[("a", 900, [3])]))
    table, lens = torch.tensor([[3], [2]], dtype=torch.int32), torch.tensor([900], dtype=torch.int32)
    step = steps.steps(["a"], {1: table}, lens, lens)["state"]
    assert step.out_slots.tolist() == [3]
    assert step.slot_table[0].tolist() == [3]


class MambaSpec(SimpleNamespace):
    """By its name, vLLM's."""


def spec(**given: Any) -> Any:
    return MambaSpec(**{"block_size": 8, "mamba_cache_mode": "align"} | given)


def test_kinds_of_states() -> None:
    assert keeps_states([spec()])
    assert not keeps_states([spec(), SimpleNamespace()])
    assert not keeps_states([])
    assert tokens_per_state([spec(), spec()]) == 8
    assert tokens_per_state([spec(mamba_cache_mode="none")]) is None
    for specs, named in (
        ([spec(num_speculative_blocks=2)], "num_speculative_blocks=2"),
        ([spec(mamba_cache_mode="all")], "'all'"),
        ([spec(), spec(block_size=16)], "other numbers of tokens"),
    ):
        with pytest.raises(UnsupportedEngine, match=named):
            tokens_per_state(specs)


def decoding(requests: str, counts: Any, blocks: Any = None) -> Any:
    """One token each; `blocks`: of the first time they are seen."""
    given = output(
        dict.fromkeys(requests, 1),
        cached=[
            (name, count, None if blocks is None else [block])
            for name, count, block in zip(requests, counts, blocks or counts, strict=True)
        ],
    )
    given.total_num_scheduled_tokens = len(requests)
    return given


def observed(interval: int = 8) -> Any:
    return SimpleNamespace(state_interval=interval, adoptions=0)


def running(blocks: StateBlocks, observer: Any, requests: str = "ab") -> None:
    """The forward that is shown, of requests of 21 tokens whose states lie in blocks 3, 4, ..."""
    lists = [(name, 21, [0] * 2 + [3 + number]) for number, name in enumerate(requests)]
    first = output(dict.fromkeys(requests, 1), new=lists)
    assert blocks.follow(first, observer) == {}
    assert blocks.shown


def test_of_forwards_that_are_not_shown_the_first_takes_the_records_and_the_next_do_nothing() -> None:
    blocks, observer = StateBlocks([group(10)]), observed()
    running(blocks, observer)
    assert blocks.follow(decoding("ab", [22, 22]), observer) == moved(rewritten=[3, 4])
    assert not blocks.shown
    for number in range(6):
        assert blocks.go_on(decoding("ab", [23 + number] * 2)), number
        assert not blocks.shown
    due = decoding("ab", [29, 29])
    assert not blocks.go_on(due)
    assert blocks.follow(due, observer) == {}
    assert blocks.shown
    grown = decoding("ab", [30, 30], [8, 9])
    assert blocks.follow(grown, observer) == moved([3, 4], [8, 9], passed=[8, 9])


@pytest.mark.parametrize("already", [False, True])
def test_after_an_output_that_failed_to_be_followed_states_are_where_it_put_them(already: bool) -> None:
    blocks, observer = StateBlocks([group(10)]), observed()
    running(blocks, observer)
    failed = decoding("ab", [30, 30], [8, 9])
    failed.total_num_scheduled_tokens = 2
    if already:  # what failed comes after
        blocks.follow(failed, observer)
    blocks.miss(failed)
    assert not blocks.shown
    assert blocks.left_out == (not already)
    assert blocks.follow(decoding("ab", [31, 31]), observer) == {}
    assert blocks.slots[1] == {"a": 8, "b": 9}
    assert blocks.shown is not already


@pytest.mark.parametrize(
    "given",
    [
        decoding("a", [23]), decoding("ba", [23, 23]), decoding("abc", [23] * 3),
        output({"a": 2, "b": 1}, cached=[("a", 23, None), ("b", 23, None)]),
    ],
    ids=["one left", "others", "more", "tokens"],
)  # fmt: skip
def test_what_is_not_the_same_decode_is_followed(given: Any) -> None:
    given.total_num_scheduled_tokens = sum(given.num_scheduled_tokens.values())
    blocks, observer = StateBlocks([group(10)]), observed()
    running(blocks, observer)
    blocks.follow(decoding("ab", [22, 22]), observer)
    assert not blocks.go_on(given)
    assert blocks.go_on(decoding("ab", [23, 23]))


def test_records_that_were_declared_unknown_have_the_next_forward_shown() -> None:
    blocks, observer = StateBlocks([group(10)]), observed()
    running(blocks, observer)
    blocks.follow(decoding("ab", [22, 22]), observer)
    observer.adoptions = 1
    assert not blocks.go_on(decoding("ab", [23, 23]))
    blocks.follow(decoding("ab", [23, 23]), observer)
    assert blocks.shown
    assert blocks.follow(decoding("ab", [24, 24]), observer) == moved(rewritten=[3, 4])


def test_a_state_at_the_end_of_a_block_is_left_with_a_record_and_copied_with_it() -> None:
    blocks, observer = StateBlocks([group(8)]), observed()
    blocks.follow(output({"a": 1}, new=[("a", 5, [3])]), observer)
    assert blocks.follow(decoding("a", [6]), observer) == moved(rewritten=[3])
    assert not blocks.go_on(decoding("a", [7]))
    assert blocks.follow(decoding("a", [7]), observer) == moved(left=[3])
    assert blocks.follow(decoding("a", [8], [9]), observer) == moved([3], [9], passed=[9])
    assert blocks.go_on(decoding("a", [9]))


def test_what_a_prompt_leaves_and_what_rests_meanwhile_has_a_record() -> None:
    blocks, observer = StateBlocks([group(100)]), observed()
    first = output({"a": 1}, new=[("a", 20, [3])])
    blocks.follow(first, observer)
    assert blocks.follow(decoding("a", [21]), observer) == moved(rewritten=[3])
    prompt = output({"b": 30}, new=[("b", 0, [5])])
    assert blocks.follow(prompt, observer) == moved(rested=[3], rewritten=[5], left=[5])
    assert blocks.follow(decoding("ab", [22, 30]), observer) == moved(rewritten=[3, 5])


def test_no_more_are_left_out_than_the_interval_allows_of_those_that_were_counted_elsewhere() -> None:
    blocks, observer = StateBlocks([group(1000)]), observed(4)
    assert blocks.may_leave_out(7) == 0
    running(blocks, observer)
    for counted in range(1, 40):
        assert blocks.may_leave_out(7 + counted) == blocks.left_out == counted - -(-counted // 4)
        if not blocks.go_on(decoding("ab", [21 + counted] * 2)):
            blocks.follow(decoding("ab", [21 + counted] * 2), observer)
            blocks.left_out += not blocks.shown
    blocks.left_out += 1
    assert blocks.may_leave_out(8 + counted) == blocks.left_out - 1
