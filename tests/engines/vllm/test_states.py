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


def test_a_state_moves_where_its_next_token_lies_in_another_block() -> None:
    blocks = StateBlocks([group()])
    assert blocks.follow(output({"a": 3}, new=[("a", 0, [6])])) == {}
    assert blocks.follow(output({"a": 1}, cached=[("a", 3, None)])) == {}
    assert blocks.follow(output({"a": 1}, cached=[("a", 4, [8])])) == {"state": StateChanges([6], [8], [])}
    assert blocks.follow(output({"a": 1}, cached=[("a", 5, None)])) == {}


def test_a_state_from_the_prefix_cache_is_copied_to_the_requests_own_block() -> None:
    blocks = StateBlocks([group()])
    found = blocks.follow(output({"a": 2}, new=[("a", 8, [0, 5, 9])]))
    assert found == {"state": StateChanges([5], [9], [])}


def test_a_prefill_over_several_blocks_leaves_a_state_before_its_last_block() -> None:
    blocks = StateBlocks([group()])
    assert blocks.follow(output({"a": 10}, new=[("a", 0, [0, 4, 7])])) == {"state": StateChanges([], [], [4])}
    assert blocks.follow(output({"b": 10}, new=[("b", 0, [0, 0, 7])])) == {}  # none was asked for


@pytest.mark.parametrize("end", [{"ended": "a"}, {"resumed": "a"}])
def test_a_request_that_ended_or_starts_anew_is_forgotten(end: dict[str, str]) -> None:
    blocks = StateBlocks([group()])
    blocks.follow(output({"a": 6}, new=[("a", 0, [6, 8])]))
    if "ended" in end:
        blocks.follow(output({}, **end))
        again = output({"a": 2}, new=[("a", 0, [9])])
    else:
        again = output({"a": 2}, cached=[("a", 0, [9])], **end)
    assert blocks.follow(again) == {}
    assert blocks.follow(output({"a": 3}, cached=[("a", 2, [3])])) == {"state": StateChanges([9], [3], [])}


def test_states_that_stay_in_their_block_are_not_followed() -> None:
    assert StateBlocks([group(None)]).follow(output({"a": 9}, new=[("a", 4, [3])])) == {}


def state_steps(own: Any, *outputs: Any, requests: int = 3) -> tuple[StateSteps, StateBlocks]:
    blocks = StateBlocks([own])
    for each in outputs:
        blocks.follow(each)
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
    blocks.follow(output({"a": 4, "b": 1}, cached=[("a", 5, None), ("b", 4, None)]))
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
    blocks.follow(output({"c": 2}, new=[("c", 0, [5])], ended="b"))
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
    blocks.follow(output({"a": 1}, cached=[("a", 1, None)]))
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
