"""Chunks of a long write tell each other their sums: never a stale one, and none that must be waited for."""

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings, strategies as st

from canary_kernels.buffers import GroupBuffers, RowBatch, allocate_buffers
from canary_kernels.checks import Backend
from canary_kernels.hashing import chain_of
from canary_kernels.layout import CHAIN, signed, unsigned
from canary_kernels.write import kernel, write_identities
from tests.kernels.scenes import TRITON_DEVICE, Scene
from tests.sizes import sized

CHUNK, AT_ONCE = 16, 32
WIDTH, ROWS = 100, 3
LAUNCH = 1 << 32


@contextmanager
def small_chunks(**limits: int) -> Iterator[None]:
    """The long shape in chunks of CHUNK tokens, also for few tokens; limits = _PROGRAMS, _ATTEMPTS."""
    changes = {"_LONG": (CHUNK, 32, 1), "_DECODE_TOKENS": 0, "_ATTEMPTS": 2} | limits
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(kernel, name, value)
        yield


def buffers_of(slots: int, device: str, chunks: int | None = 1024) -> GroupBuffers:
    """Empty records and room for the sums of so many chunks; None = none at all."""
    buffers = allocate_buffers(slots, torch.ones(1, dtype=torch.int64, device=device))
    sums = None if chunks is None else torch.zeros((1 + chunks, 2), dtype=torch.int64, device=device)
    return dataclasses.replace(buffers, sums=sums)


def batch_of(spans: list[tuple[int, int, int]], rng: random.Random, with_digests: bool = True) -> RowBatch:
    """(row, prefix, extend) of each request, in consecutive slots; row -1 = padding, which has tokens too."""
    extend = [span[2] for span in spans]
    count = sum(extend) + rng.randrange(20)
    slots = [row * WIDTH + prefix + n for row, prefix, more in spans for n in range(more)]
    positions = [prefix + n for _, prefix, more in spans for n in range(more)]
    digests = [signed(rng.getrandbits(64)) for _ in spans]
    return RowBatch(
        slot_table=torch.arange(ROWS * WIDTH).view(ROWS, WIDTH),
        page_size=1,
        rows=torch.tensor([span[0] for span in spans]),
        starts=torch.zeros(len(spans), dtype=torch.int64),
        prefix_lens=torch.tensor([span[1] for span in spans]),
        extend_lens=torch.tensor(extend),
        token_starts=torch.tensor([0, *extend]).cumsum(0),
        digests=torch.tensor(digests) if with_digests else None,
        input_ids=torch.tensor([rng.randrange(1 << 31) for _ in range(count)]),
        positions=torch.tensor(positions + [0] * (count - len(positions))),
        out_slots=torch.tensor(slots + [-1] * (count - len(slots))),
    )


@st.composite
def launches(draw: st.DrawFn) -> list[RowBatch]:
    """Some forwards of random requests, one after another."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    batches = []
    for _ in range(3):
        rows = rng.sample(range(ROWS), rng.randint(1, ROWS))
        spans = []
        for row in rows:
            prefix = rng.choice([0, 1, rng.randrange(WIDTH // 2)])
            extend = rng.choice([0, 1, CHUNK, 2 * CHUNK, rng.randrange(1, WIDTH - prefix)])
            spans.append((row if rng.random() < 0.9 else -1, prefix, min(extend, WIDTH - prefix)))
        batches.append(batch_of(spans, rng, rng.random() < 0.5))
    return [batch for batch in batches if batch.input_ids.shape[0]]


@settings(max_examples=sized(20, 7))
@given(
    batches=launches(),
    programs=st.sampled_from([2, 5, 8192]),
    looks=st.sampled_from([0, 1, 4]),
    chunks=st.sampled_from([None, 0, 3, 1024]),
)
def test_launch_after_launch_equals_the_reference(batches, programs, looks, chunks):
    """Whatever the lengths before, how often it looks, how little room there is; no tick in between."""
    plain = buffers_of(ROWS * WIDTH, "cpu")
    buffers = buffers_of(ROWS * WIDTH, TRITON_DEVICE, chunks)
    with small_chunks(_PROGRAMS=programs, _ATTEMPTS=looks):
        for number, batch in enumerate(batches, start=1):
            write_identities(Backend.TORCH, plain, batch)
            moved = Scene(records=plain.records, batch=batch).batch_on(Backend.TRITON)
            write_identities(Backend.TRITON, buffers, moved)
            assert torch.equal(buffers.records.cpu(), plain.records)
            assert torch.equal(buffers.counters.cpu(), plain.counters)
            if buffers.sums is not None and looks:
                assert buffers.sums[0].tolist() == [number * LAUNCH, 0]


def one_request(tokens: torch.Tensor) -> RowBatch:
    """One request that adds these tokens, in as many slots."""
    (count,) = tokens.shape
    column = {"device": TRITON_DEVICE, "dtype": torch.int64}
    every = torch.arange(count, **column)
    zero = torch.zeros(1, **column)
    return RowBatch(
        slot_table=every.view(1, -1), page_size=1, rows=zero, starts=zero, prefix_lens=zero,
        extend_lens=zero + count, token_starts=torch.tensor([0, count], **column), digests=None,
        input_ids=tokens.to(TRITON_DEVICE), positions=every, out_slots=every,
    )  # fmt: skip


def written_chain(buffers: GroupBuffers, tokens: torch.Tensor) -> torch.Tensor:
    write_identities(Backend.TRITON, buffers, one_request(tokens))
    return buffers.records[: tokens.shape[0], CHAIN].cpu()


def test_every_chunk_tells_its_sum_under_the_launch_number():
    tokens = torch.arange(70) * 7919
    chain = chain_of(tokens).tolist()
    buffers = buffers_of(70, TRITON_DEVICE)
    with small_chunks():
        for launch in (1, 2, 3):
            written_chain(buffers, tokens)
            assert buffers.sums[0].tolist() == [launch * LAUNCH, 0]
            words = buffers.sums[1:6].cpu().tolist()
            for chunk, (low, high) in enumerate(words):
                ends = chain[chunk * CHUNK], chain[min((chunk + 1) * CHUNK, 70)]
                assert (low >> 32, high >> 32) == (launch, launch)
                assert unsigned(ends[1] - ends[0]) == (high % LAUNCH << 32) + low % LAUNCH
    assert not buffers.sums[6:].any()


@pytest.mark.skipif(TRITON_DEVICE == "cuda", reason="program 1 may tell its own sum before program 0 looks")
def test_what_was_told_is_not_summed_anew():
    """Two programs, interpreted one after the other: the first one's second chunk finds a planted sum."""
    tokens = torch.arange(3 * CHUNK) * 7919
    buffers = buffers_of(3 * CHUNK, TRITON_DEVICE)
    buffers.sums[2] = torch.tensor([LAUNCH + 5, LAUNCH + 1])  # of launch 1: 2**32 + 5
    with small_chunks(_PROGRAMS=2):
        chain = written_chain(buffers, tokens)
    expected = chain_of(tokens)[:-1]
    assert torch.equal(chain[: 2 * CHUNK], expected[: 2 * CHUNK])
    told = expected[CHUNK].item() + LAUNCH + 5
    assert chain[2 * CHUNK].item() == signed(told)


@pytest.mark.parametrize("looks", [1, 32])
def test_sums_of_an_earlier_launch_are_not_believed(looks):
    """Two programs for five chunks: the first one looks for sums of the second that are not there yet."""
    buffers = buffers_of(5 * CHUNK, TRITON_DEVICE)
    with small_chunks(_PROGRAMS=2, _ATTEMPTS=looks):
        for launch in range(4):
            tokens = torch.arange(5 * CHUNK) * 7919 + launch
            assert torch.equal(written_chain(buffers, tokens), chain_of(tokens)[:-1])


def test_more_chunks_than_are_looked_at_at_once():
    tokens = torch.arange((AT_ONCE + 5) * CHUNK) * 31
    buffers = buffers_of(tokens.shape[0], TRITON_DEVICE)
    with small_chunks():
        for length in (tokens.shape[0], 3 * CHUNK + 1, *sized([tokens.shape[0] - 1], [])):
            chain = written_chain(buffers, tokens[-length:])
            assert torch.equal(chain, chain_of(tokens[-length:])[:-1])
