"""Digests of requests that come, go on, fall back and end: equal to the chain over plain token lists."""

import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from canary_kernels.checks import Backend
from canary_kernels.digest import (
    DigestMemory,
    InputTokens,
    TokenLists,
    extend_runs,
    follow_inputs,
    follow_lists,
    one_by_one,
)
from canary_kernels.hashing import chain_of
from canary_kernels.layout import CHAIN_ANCHOR, signed
from tests.kernels.scenes import device_of
from tests.sizes import sized

MAX_REQUESTS, WIDTH = 6, 3000
BACKENDS = st.sampled_from(list(Backend))


def chain(tokens, count):
    return int(chain_of(torch.tensor(tokens[:count], dtype=torch.int64))[count])


def starts_of(extends):
    return torch.tensor([0, *extends], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@settings(max_examples=sized(30, 10))
@given(backend=BACKENDS, seed=st.integers(0, 2**32), kind=st.sampled_from([torch.int32, torch.int64]))
def test_lists_are_followed(backend, seed, kind):
    draw, device = random.Random(seed), device_of(backend)
    memory = DigestMemory.allocate(MAX_REQUESTS, torch.device(device))
    lists = [[draw.randrange(-(2**31), 2**31) for _ in range(WIDTH)] for _ in range(MAX_REQUESTS)]
    computed = [0] * MAX_REQUESTS
    for _ in range(4):
        rows = draw.sample(range(MAX_REQUESTS), draw.randrange(1, MAX_REQUESTS + 1))
        for row in rows:
            # Forward by any length, or back to the start, or behind rejected drafts.
            computed[row] = draw.choice((draw.randrange(WIDTH), min(computed[row] + 1, WIDTH), 0))
        for row in set(range(MAX_REQUESTS)) - set(rows):
            if draw.random() < 0.3:
                lists[row] = [draw.randrange(-(2**31), 2**31) for _ in range(WIDTH)]
                memory.counts[row] = 0
        extends = [draw.randrange(5) for _ in rows]
        step = TokenLists(
            rows=torch.tensor(rows, dtype=kind, device=device),
            tokens=torch.tensor(lists, dtype=torch.int32, device=device),
            computed=torch.tensor(computed, dtype=kind, device=device),
            token_starts=starts_of(extends).to(device),
        )
        follow_lists(backend, memory, step)
        count = len(rows)
        assert memory.digests[:count].tolist() == [chain(lists[row], computed[row]) for row in rows]
        assert memory.prefix_lens[:count].tolist() == [computed[row] for row in rows]
        assert memory.extend_lens[:count].tolist() == extends


@settings(max_examples=sized(30, 10))
@given(backend=BACKENDS, seed=st.integers(0, 2**32))
def test_inputs_are_followed(backend, seed):
    draw, device = random.Random(seed), device_of(backend)
    memory = DigestMemory.allocate(MAX_REQUESTS, torch.device(device))
    memory.chains.fill_(draw.randrange(2**62))
    lists = [[draw.randrange(-(2**31), 2**31) for _ in range(WIDTH)] for _ in range(MAX_REQUESTS)]
    known = {}
    for _ in range(4):
        rows = draw.sample(range(MAX_REQUESTS), draw.randrange(1, MAX_REQUESTS + 1))
        fresh = [row not in known or draw.random() < 0.2 for row in rows]
        for row, begins in zip(rows, fresh, strict=True):
            known[row] = draw.randrange(500) if begins else known[row]
        prefix = [known[row] for row in rows]
        begun = [chain(lists[row], known[row]) for row in rows]
        extends = [draw.choice((1, draw.randrange(600))) for _ in rows]
        ids = [
            token
            for row, extend in zip(rows, extends, strict=True)
            for token in lists[row][known[row] : known[row] + extend]
        ]
        places = torch.tensor([rows, [int(begins) for begins in fresh], begun], dtype=torch.int64)
        step = InputTokens(
            places=places.to(device),
            input_ids=torch.tensor([*ids, 9, 9], dtype=torch.int32, device=device),
            token_starts=starts_of(extends).to(device),
            prefix_lens=torch.tensor(prefix, dtype=torch.int32, device=device),
        )
        follow_inputs(backend, memory, step)
        assert memory.digests[: len(rows)].tolist() == [
            chain(lists[row], length) for row, length in zip(rows, prefix, strict=True)
        ]
        assert not step.places[1].any()
        known |= {row: known[row] + extend for row, extend in zip(rows, extends, strict=True)}


@settings(max_examples=sized(30, 10))
@given(backend=BACKENDS, seed=st.integers(0, 2**32), tail=st.sampled_from([1, 3, 4]))
def test_rejected_drafts_leave_the_chain(backend, seed, tail):
    draw, device = random.Random(seed), device_of(backend)
    memory = DigestMemory.allocate(MAX_REQUESTS, torch.device(device), tail)
    memory.chains.fill_(draw.randrange(2**62))
    memory.counts.fill_(draw.randrange(100))
    lists = [[draw.randrange(-(2**31), 2**31) for _ in range(WIDTH)] for _ in range(MAX_REQUESTS)]
    known, fed = {}, {}
    for _ in range(4):
        rows = draw.sample(range(MAX_REQUESTS), draw.randrange(1, MAX_REQUESTS + 1))
        fresh = [row not in known or draw.random() < 0.2 for row in rows]
        for row, begins in zip(rows, fresh, strict=True):
            if begins:
                known[row] = draw.randrange(500)
            else:
                rejected = draw.randrange(min(tail, fed[row]) + 1)
                known[row] += fed[row] - rejected
                others = [draw.randrange(1000) for _ in range(rejected)]
                lists[row][known[row] : known[row] + rejected] = others
            fed[row] = draw.choice((1, 1 + tail, draw.randrange(1, 600)))
        extends = [fed[row] for row in rows]
        ids = [token for row in rows for token in lists[row][known[row] : known[row] + fed[row]]]
        places = [rows, list(map(int, fresh)), [chain(lists[row], known[row]) for row in rows]]
        step = InputTokens(
            places=torch.tensor(places, dtype=torch.int64, device=device),
            input_ids=torch.tensor([*ids, 9, 9], dtype=torch.int32, device=device),
            token_starts=starts_of(extends).to(device),
            prefix_lens=torch.tensor([known[row] for row in rows], dtype=torch.int32, device=device),
        )
        follow_inputs(backend, memory, step)
        assert memory.digests[: len(rows)].tolist() == places[2]
        assert not step.places[1].any()


@pytest.mark.parametrize("backend", list(Backend))
def test_a_new_request_has_the_anchor(backend):
    device = device_of(backend)
    memory = DigestMemory.allocate(1, torch.device(device))
    one = torch.zeros(1, dtype=torch.int32, device=device)
    step = TokenLists(rows=one, tokens=one[None], computed=one, token_starts=starts_of([1]).to(device))
    follow_lists(backend, memory, step)
    assert memory.digests.tolist() == [signed(CHAIN_ANCHOR)]


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.NUMBA])
@pytest.mark.parametrize("known", [[], [3], [0, 5, 5, 40]])
def test_chains_are_extended_one_by_one(backend: Backend, known: list[int]) -> None:
    """A call that fails changes nothing, whatever it was given."""
    lists = [torch.randint(0, 1 << 31, (60,)) for _ in known]
    chains = [chain_of(tokens) for tokens in lists]
    state = np.array([known, [int(chain[size]) for chain, size in zip(chains, known, strict=True)]])
    state = np.ascontiguousarray(state, dtype=np.int64)
    ahead = np.arange(len(known), dtype=np.int64)
    extend = one_by_one(backend, state, ahead)
    for _ in range(20):
        computed = [size + place for place, size in enumerate(known)]
        for wrong in ([*range(len(known) + 1)], *([["none"] * len(known)] if known else [])):
            with pytest.raises(struct.error):
                extend(computed, wrong)  # type: ignore[arg-type]
        newest = [int(tokens[size]) for tokens, size in zip(lists, known, strict=True)]
        for place in range(len(known)):
            computed[place] += 1
            assert not extend(computed, newest)
            computed[place] -= 1
        assert extend(computed, newest)
        known = [size + 1 for size in known]
        wanted = [int(chain[size]) for chain, size in zip(chains, known, strict=True)]
        assert state.tolist() == [known, wanted]


ON_HOST = st.sampled_from([Backend.TORCH, Backend.NUMBA])
RUNS = st.lists(st.tuples(st.integers(0, 40), st.integers(-1, 60)), max_size=5)


@given(backend=ON_HOST, runs=RUNS, seed=st.integers(0, 2**32))
def test_runs_of_tokens_are_added_where_they_begin(
    backend: Backend, runs: list[tuple[int, int]], seed: int
) -> None:
    draw = random.Random(seed)
    lists = [[draw.randrange(-(2**31), 2**31) for _ in range(60)] for _ in runs]
    chains = np.array([chain(tokens, start) for tokens, (start, _) in zip(lists, runs, strict=True)])
    chains = chains.astype(np.int64)
    starts, stops = np.array(runs, dtype=np.int64).reshape(-1, 2).T.copy()
    pairs = zip(lists, runs, strict=True)
    laid = [token for tokens, (start, stop) in pairs for token in tokens[start : max(stop, 0)]]
    extend_runs(backend, np.array(laid, dtype=np.int32), starts, stops, chains)
    ends = [max(start, stop) for start, stop in runs]
    assert chains.tolist() == [chain(tokens, end) for tokens, end in zip(lists, ends, strict=True)]


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.NUMBA])
@pytest.mark.parametrize("count", [0, 4, 6])
def test_runs_with_other_tokens_than_theirs_change_nothing(backend: Backend, count: int) -> None:
    starts, stops, chains = (np.array(each, dtype=np.int64) for each in ([0, 9, 2], [4, 3, 3], [5, 6, 7]))
    with pytest.raises(ValueError, match=f"{count} tokens for runs of 5"):
        extend_runs(backend, np.zeros(count, dtype=np.int32), starts, stops, chains)
    assert chains.tolist() == [5, 6, 7]
