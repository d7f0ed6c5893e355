"""Compressed entries of a forward: those of whole runs, each with a token made from its run."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from canary_kernels.hashing import mix_arrays
from canary_kernels.layout import CHAIN_ANCHOR, signed
from canary_obs.engine_api.views import GroupStep
from canary_obs.engines.sglang.entry_steps import EntrySteps
from canary_obs.engines.toolkit.surrogate_tokens import surrogate_tokens

RATIO = 4
# Rows of a request table: a request's slots follow one another within a page of 16.
TABLE = torch.tensor([0, 32, 64], dtype=torch.int32)[:, None] + torch.arange(16, dtype=torch.int32)


class Request:
    """What SGLang keeps of a request."""

    def __init__(self, prompt: list[int], output: list[int]) -> None:
        self.origin_input_ids, self.output_ids = array("q", prompt), output

    @property
    def tokens(self) -> list[int]:
        return [*self.origin_input_ids, *self.output_ids]


def longs(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def surrogates(tokens: list[int]) -> list[int]:
    """Of whole runs."""
    whole = tokens[: len(tokens) // RATIO * RATIO]
    return surrogate_tokens(np.array(whole, dtype=np.int32), RATIO).tolist()  # type: ignore[no-any-return]


def chain(tokens: list[int]) -> int:
    """Over the entries of these tokens; not by the code under test: of all of them at once."""
    entries = surrogates(tokens)
    mixed = mix_arrays(np.array(entries, dtype=np.int64), np.arange(len(entries)))
    return signed((CHAIN_ANCHOR + int(mixed.sum(dtype=np.uint64))) & ((1 << 64) - 1))


def forward(steps: EntrySteps, *parts: tuple[int, Request, int, int]) -> GroupStep:
    """`parts`: row, request, and its tokens before and after the forward."""
    new = [(row, place) for row, _, prefix, end in parts for place in range(prefix, end)]
    inputs = [token for _, request, prefix, end in parts for token in request.tokens[prefix:end]]
    batch = SimpleNamespace(
        input_ids=torch.tensor(inputs), req_pool_indices=torch.tensor([row for row, *_ in parts]),
        out_cache_loc=torch.tensor([int(TABLE[row, place]) for row, place in new]),
    )  # fmt: skip
    requests = [request for _, request, *_ in parts]
    prefixes, ends = (longs(*column) for column in zip(*((a, b) for *_, a, b in parts), strict=True))
    return steps.build(batch, requests, prefixes, ends)


def shown(step: GroupStep) -> dict[str, Any]:
    tokens = step.tokens
    assert tokens is not None
    return {
        "prefixes": tokens.prefix_lens.tolist(), "counts": tokens.extend_lens.tolist(),
        "starts": tokens.token_starts.tolist(), "inputs": tokens.input_ids.tolist(),
        "positions": tokens.positions.tolist(), "out": step.out_slots.tolist(),
    }  # fmt: skip


def digests(step: GroupStep) -> list[int]:
    assert step.tokens is not None
    assert step.tokens.digests is not None
    return step.tokens.digests.tolist()  # type: ignore[no-any-return]


def test_a_forward_writes_the_entries_of_the_runs_that_it_completes() -> None:
    first, second = Request(list(range(100, 110)), []), Request([7, 8, 9], [])
    step = forward(EntrySteps(TABLE, RATIO), (1, first, 0, 10), (2, second, 0, 3))
    assert shown(step) == {
        "prefixes": [0, 0], "counts": [2, 0], "starts": [0, 2, 2], "inputs": surrogates(first.tokens),
        "positions": [0, 1], "out": [8, 9],
    }  # fmt: skip
    assert digests(step) == [chain([]), chain([])]
    assert step.slot_table[1, :2].tolist() == [8, 9]


def test_a_run_may_be_of_several_forwards_and_of_prompt_and_output() -> None:
    steps, request = EntrySteps(TABLE, RATIO), Request([5, 6, 7, 8, 9, 10], [])
    other = Request([1, 2, 3, 4, 5], [])
    forward(steps, (1, other, 0, 5), (2, request, 0, 6))
    request.output_ids += [11, 12]
    found = []
    for end in (7, 8):
        step = forward(steps, (1, other, 5, 5), (2, request, end - 1, end))
        found.append((shown(step)["inputs"], shown(step)["positions"], shown(step)["out"]))
        assert digests(step) == [chain(other.tokens[:4]), chain(request.tokens[:4])]
    assert found == [([], [], []), (surrogates(request.tokens)[1:], [1], [17])]
    assert step.slot_table[2, :2].tolist() == [16, 17]


def test_a_request_that_was_taken_back_is_computed_anew() -> None:
    steps, request = EntrySteps(TABLE, RATIO), Request(list(range(12)), [])
    forward(steps, (1, request, 0, 8))
    assert digests(forward(steps, (1, request, 8, 12))) == [chain(request.tokens[:8])]
    # Its first four are still in the prefix cache.
    assert digests(forward(steps, (1, request, 4, 12))) == [chain(request.tokens[:4])]
    assert digests(forward(steps, (1, request, 0, 12))) == [chain([])]


def test_another_token_in_a_run_makes_another_entry() -> None:
    inputs = []
    for last in (8, 9):
        step = forward(EntrySteps(TABLE, RATIO), (1, Request([5, 6, 7, last], []), 0, 4))
        inputs += shown(step)["inputs"]
    assert len(set(inputs)) == 2
