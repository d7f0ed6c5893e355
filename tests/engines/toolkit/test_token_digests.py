"""Digests of a moving batch against the chain of each request's tokens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, strategies as st

from canary_kernels.checks import Backend
from canary_kernels.hashing import chain_of
from canary_obs.engines.toolkit.token_digests import TokenDigests

NAMES = ("a", "b", "c", "d", "e")
WIDTH = 40


@st.composite
def histories(draw: st.DrawFn) -> list[list[tuple[str, int, bool]]]:
    """Batches of (request, computed tokens, new tokens under this id)."""
    batches = []
    for _ in range(draw(st.integers(1, 8))):
        names = draw(st.permutations(NAMES))[: draw(st.integers(0, len(NAMES)))]
        batches.append([(name, draw(st.integers(0, WIDTH)), draw(st.booleans())) for name in names])
    return batches


@given(histories(), st.integers(0, 2**31), st.sampled_from([Backend.TORCH, Backend.NUMBA]))
def test_every_batch_has_the_chains_of_its_tokens(
    batches: list[list[tuple[str, int, bool]]], seed: int, backend: Backend
) -> None:
    draw = np.random.default_rng(seed)
    owned = {name: draw.integers(0, 2**31, WIDTH).astype(np.int32) for name in NAMES}
    digests = TokenDigests(backend)
    for batch in batches:
        for name, _, renewed in batch:
            if renewed:
                owned[name] = draw.integers(0, 2**31, WIDTH).astype(np.int32)
                digests.forget([name])
        tokens = np.full((len(NAMES), WIDTH), -7, dtype=np.int32)
        for row, (name, end, _) in enumerate(batch):
            tokens[row, :end] = owned[name][:end]
        ends = np.array([end for _, end, _ in batch], dtype=np.int32)
        found = digests.advance([name for name, _, _ in batch], tokens, ends)
        expected = [int(chain_of(torch.from_numpy(owned[name][:end]))[-1]) for name, end, _ in batch]
        assert found.tolist() == expected


def test_nothing_is_kept_of_requests_that_ended() -> None:
    """Each ends in the batch, or after it has left it; one returns, and its tokens are not hashed again."""
    digests, tokens = TokenDigests(Backend.TORCH), np.full((2, WIDTH), 3, dtype=np.int32)
    for number in range(40):
        batch = [f"long {number % 2}", f"short {number}"]
        digests.advance(batch, tokens, np.full(2, 20, dtype=np.int32))
        if number % 3:
            digests.forget([batch[1]])
            digests.advance(batch[:1], tokens, np.full(1, 20, dtype=np.int32))
        else:
            digests.advance(batch[:1], tokens, np.full(1, 20, dtype=np.int32))
            digests.forget([batch[1]])
        kept = {*digests._absent, *digests._requests}
        assert kept == {"long 0", "long 1"} if number else {"long 0"}
    unread = np.zeros_like(tokens)
    (digest,) = digests.advance(["long 0"], unread, np.full(1, 20, dtype=np.int32)).tolist()
    assert digest == int(chain_of(torch.full((20,), 3, dtype=torch.int32))[-1])
