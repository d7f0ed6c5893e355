"""On a GPU: chunks of long writes exchange correct sums, back to back, with other work, in a graph."""

import random

import pytest
import torch

from canary_kernels.buffers import RowBatch, allocate_buffers
from canary_kernels.checks import Backend
from canary_kernels.hashing import chain_of
from canary_kernels.layout import CHAIN
from canary_kernels.write import write_identities

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONGEST = 40_000  # 157 chunks: more than a GPU has multiprocessors
LAUNCH = 1 << 32


def batch_of(tokens: torch.Tensor, lengths: list[int]) -> RowBatch:
    """Requests that add so many of these tokens (on the GPU), one after another, in consecutive slots."""
    column = {"device": "cuda", "dtype": torch.int64}
    (count,) = tokens.shape
    every = torch.arange(count, **column)
    zeros = torch.zeros(len(lengths), **column)
    starts = torch.tensor([0, *lengths], **column).cumsum(0)
    positions = torch.cat([torch.arange(length, **column) for length in lengths])
    return RowBatch(
        slot_table=every.view(1, -1).expand(len(lengths), -1), page_size=1,
        rows=torch.arange(len(lengths), **column), starts=zeros, prefix_lens=zeros,
        extend_lens=torch.tensor(lengths, **column), token_starts=starts, digests=zeros,
        input_ids=tokens, positions=positions, out_slots=every,
    )  # fmt: skip


def chains_of(tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.cat([chain_of(part)[:-1] for part in tokens.cpu().split(lengths)])


@pytest.mark.parametrize("other_work", [False, True])
def test_back_to_back(other_work):
    """Lengths vary, so that each launch finds the sums of several earlier ones; the host waits for none."""
    rng = random.Random(1)
    buffers = allocate_buffers(LONGEST, torch.ones(1, dtype=torch.int64, device="cuda"))
    forwards = []
    for number in range(100):
        lengths = [
            rng.choice([300, 8192, rng.randrange(257, LONGEST // 3)]) for _ in range(rng.randint(1, 3))
        ]
        tokens = torch.randint(0, 1 << 31, (sum(lengths),), device="cuda")
        forwards.append((number, lengths, batch_of(tokens, lengths)))
    square = torch.ones((4096, 4096), device="cuda")
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    written = []
    for number, _, batch in forwards:
        if other_work and number % 4 == 0:
            with torch.cuda.stream(other):
                torch.mm(square, square)
        write_identities(Backend.TRITON, buffers, batch)
        written.append(buffers.records[: batch.input_ids.shape[0], CHAIN].clone())
    for (number, lengths, batch), chains in zip(forwards, written, strict=True):
        assert torch.equal(chains.cpu(), chains_of(batch.input_ids, lengths)), number
    assert buffers.sums[0, 0].item() == len(forwards) * LAUNCH


def test_replayed_with_the_same_arguments():
    buffers = allocate_buffers(8192, torch.ones(1, dtype=torch.int64, device="cuda"))
    batch = batch_of(torch.zeros(8192, dtype=torch.int64, device="cuda"), [8192])
    write_identities(Backend.TRITON, buffers, batch)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_identities(Backend.TRITON, buffers, batch)
        write_identities(Backend.TRITON, buffers, batch)
    for seed in range(50):
        tokens = torch.arange(8192) * 7919 + seed
        batch.input_ids.copy_(tokens)
        graph.replay()
        assert torch.equal(buffers.records[:, CHAIN].cpu(), chain_of(tokens)[:-1]), seed
    assert buffers.sums[0, 0].item() == 101 * LAUNCH
