"""Chains over token lists: equal to the chain over each of them alone."""

import struct
from array import array

import numpy as np
import pytest
import torch

from canary_kernels.hashing import chain_of
from canary_obs.engines.toolkit.chain_sums import ANCHOR, added_chains, token_array

FIRST, SECOND = [5, -7, 2**31 - 1, 3], [9, 8, -(2**31)]


def chain(tokens: list[int]) -> int:
    return int(chain_of(torch.tensor(tokens, dtype=torch.int64))[len(tokens)]) % 2**64


@pytest.mark.parametrize("writable", [True, False])
def test_chains_go_on_with_the_tokens_of_their_requests(writable: bool) -> None:
    before = np.array([ANCHOR, chain(SECOND[:1])], dtype=np.uint64)
    ids = token_array(FIRST + SECOND[1:])
    ids.flags.writeable = writable
    after = added_chains(before, ids, np.array([0, 1]), np.array([4, 3]))
    assert after.tolist() == [chain(FIRST), chain(SECOND)]
    assert before.tolist() == [int(ANCHOR), chain(SECOND[:1])], "those given are kept"


def test_bounds_may_be_any_integers() -> None:
    stops = np.array([4, 0, 2, 0], dtype=np.int32)[::2]
    before = np.full(2, ANCHOR, dtype=np.uint64)
    after = added_chains(before, token_array(FIRST + SECOND[:2]), np.zeros(2, dtype=np.int32), stops)
    assert after.tolist() == [chain(FIRST), chain(SECOND[:2])]


@pytest.mark.parametrize("tokens", [[], [0], FIRST])
def test_tokens_become_an_array_of_their_own(tokens: list[int]) -> None:
    found = token_array(tokens)
    assert (found.tolist(), found.dtype) == (tokens, np.int32)
    assert found.flags.writeable
    kept = array("q", tokens)
    again = token_array(kept)
    assert (again.tolist(), again.dtype) == (tokens, np.int32)
    kept.append(1)  # nothing holds its memory
    assert again.tolist() == tokens


@pytest.mark.parametrize("wrong", [None, 2**31, "5"])
def test_what_is_no_token_is_refused(wrong: object) -> None:
    with pytest.raises(struct.error):
        token_array([1, wrong])  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1])
def test_what_is_no_token_is_refused_in_an_array(wrong: int) -> None:
    with pytest.raises(struct.error):
        token_array(array("q", [1, wrong]))
