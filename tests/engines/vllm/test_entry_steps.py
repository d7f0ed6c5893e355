"""Records of compressed entries: what a forward completes, and what came before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from canary_kernels.hashing import chain_of
from canary_obs.engine_api.views import GroupStep, GroupTokens, StepTypes
from canary_obs.engines.toolkit.surrogate_tokens import surrogate_tokens
from canary_obs.engines.vllm.entry_steps import EntrySteps, HostBatch

TYPES = StepTypes(
    slot_table=torch.int32, rows=torch.int64, lengths=torch.int32, input_ids=torch.int32,
    positions=torch.int64, out_slots=torch.int64, has_digests=True, expected_ids=None,
)  # fmt: skip
DRAW = np.random.default_rng(3)
TOKENS = DRAW.integers(1, 1000, (3, 64)).astype(np.int32)
TABLES = {3: torch.arange(12, dtype=torch.int32).view(3, 4)}


def group(name: str, ratio: int) -> Any:
    return SimpleNamespace(view=SimpleNamespace(name=name), number=3, entry_tokens=ratio)


@pytest.fixture
def steps() -> EntrySteps:
    return EntrySteps([group("c4", 4), group("c4_indexer", 4), group("c16", 16)], TYPES)


def forward(
    steps: EntrySteps, before: list[int], after: list[int], tokens: Any = TOKENS
) -> dict[str, GroupStep]:
    """Of requests a, b, ...: attention writes the entry of token i of the forward to slot 100 + i."""
    spans = list(enumerate(zip(before, after, strict=True)))
    ids = np.concatenate([tokens[row, first:last] for row, (first, last) in spans])
    slots = {name: torch.arange(100, 100 + ids.size) for name in ("c4", "c4_indexer", "c16")}
    batch = HostBatch(["a", "b", "c"][: len(before)], tokens, np.array(before), np.array(after), ids)
    return steps.steps(batch, TABLES, slots)


def shown(step: GroupStep) -> GroupTokens:
    assert step.tokens is not None
    return step.tokens


def expected(row: int, count: int, ratio: int, tokens: Any = TOKENS) -> np.ndarray[Any, Any]:
    return surrogate_tokens(tokens[row, : count * ratio], ratio)


def digest(row: int, count: int, ratio: int) -> int:
    return int(chain_of(torch.from_numpy(expected(row, count, ratio).astype(np.int64)))[-1])


def test_an_entry_is_complete_with_the_last_token_of_its_run(steps: EntrySteps) -> None:
    found = forward(steps, [0, 6, 20], [5, 8, 21])
    tokens = shown(found["c4"])
    assert tokens.prefix_lens.tolist() == [0, 1, 5]
    assert tokens.extend_lens.tolist() == [1, 1, 0]
    assert tokens.token_starts.tolist() == [0, 1, 2, 2]
    assert tokens.positions.tolist() == [0, 1]
    assert tokens.input_ids.tolist() == [expected(0, 1, 4)[0], expected(1, 2, 4)[1]]
    assert found["c4"].out_slots.tolist() == [103, 106]
    assert found["c4"].slot_table is TABLES[3]
    assert found["c4_indexer"].tokens is tokens, "keys share the lifetime of their entries"
    assert shown(found["c16"]).extend_lens.tolist() == [0, 0, 0]
    assert shown(found["c16"]).prefix_lens.tolist() == [0, 0, 1]
    assert found["c16"].out_slots.tolist() == []


def test_types_are_those_that_kernels_were_compiled_for(steps: EntrySteps) -> None:
    tokens = shown(forward(steps, [0], [9])["c4"])
    assert tokens.prefix_lens.dtype is tokens.extend_lens.dtype is tokens.token_starts.dtype is TYPES.lengths
    assert tokens.input_ids.dtype is TYPES.input_ids
    assert tokens.positions.dtype is TYPES.positions


def test_chunks_write_what_one_forward_writes(steps: EntrySteps) -> None:
    whole = shown(forward(steps, [0], [64])["c4"]).input_ids.tolist()
    assert whole == expected(0, 16, 4).tolist()
    steps.forget(["a"])
    chunked, at = [], 0
    for stop in (1, 4, 6, 7, 19, 20, 33, 64):
        tokens = shown(forward(steps, [at], [stop])["c4"])
        if at >= 4:
            assert tokens.digests is not None
            assert tokens.digests.tolist() == [digest(0, at // 4, 4)]
        chunked += tokens.input_ids.tolist()
        at = stop
    assert chunked == whole


def test_a_prefix_from_the_cache_is_followed_from_the_runners_list(steps: EntrySteps) -> None:
    for ratio, name in ((4, "c4"), (16, "c16")):
        tokens = shown(forward(steps, [32, 48], [33, 49])[name])
        assert tokens.digests is not None
        assert tokens.digests.tolist() == [digest(0, 32 // ratio, ratio), digest(1, 48 // ratio, ratio)]


def test_a_request_that_comes_back_is_computed_anew(steps: EntrySteps) -> None:
    forward(steps, [40], [41])
    tokens = shown(forward(steps, [16], [24])["c4"])
    assert tokens.digests is not None
    assert tokens.digests.tolist() == [digest(0, 4, 4)]


def test_another_request_of_that_name_is_not_taken_for_it(steps: EntrySteps) -> None:
    forward(steps, [16], [24])
    steps.forget(["a"])
    others = TOKENS[::-1].copy()
    tokens = shown(forward(steps, [20], [24], others)["c4"])
    assert tokens.digests is not None
    assert tokens.digests.tolist() == [digest(2, 5, 4)]


def test_a_token_fed_wrong_is_recorded_as_it_was_fed(steps: EntrySteps) -> None:
    batch = HostBatch(
        ["a"], TOKENS, np.array([6]), np.array([8]), np.array([TOKENS[0, 6], 7], dtype=np.int32)
    )
    slots = dict.fromkeys(("c4", "c4_indexer", "c16"), torch.tensor([50, 51]))
    tokens = shown(steps.steps(batch, TABLES, slots)["c4"])
    fed = np.array([[*TOKENS[0, :7], 7]], dtype=np.int32)
    assert tokens.input_ids.tolist() == [expected(0, 2, 4, fed)[1]]
    later = shown(forward(steps, [8], [9])["c4"])
    assert later.digests is not None
    assert later.digests.tolist() == [digest(0, 2, 4)], "the list knows better"
