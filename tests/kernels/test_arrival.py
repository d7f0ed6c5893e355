"""Blocks that were loaded, compared with what was sent and with before; in plain Python as well."""

from __future__ import annotations

import random

import pytest
import torch

from canary_kernels.arrival import ARRIVAL_WORDS, Unchanged, judge_arrivals
from canary_kernels.buffers import allocate_buffers
from canary_kernels.checks import Backend, KernelArgumentError
from tests.kernels.scenes import STEP, assert_same, device_of
from tests.oracles import records as oracle

SLOTS = 64
BACKENDS = pytest.mark.parametrize("backend", list(Backend))


def judged(backend, rows):
    """rows: (slot, position, slots, copies, now, unchanged); the backend's buffers and the oracle's group."""
    device = device_of(backend)
    clock = torch.full((1,), STEP, dtype=torch.int64, device=device)
    buffers = allocate_buffers(SLOTS, clock, 512)
    group = oracle.Group([oracle.Record() for _ in range(SLOTS)])
    width = max((len(row[3]) for row in rows), default=0)
    blocks = [[slot, position, size, len(copies), *unchanged, *now]
              for slot, position, size, copies, now, unchanged in rows]  # fmt: skip
    # What is behind the last copy of a block is not read.
    sent = [[*row[3], *[row[4]] * (width - len(row[3]))] for row in rows]
    matched = judge_arrivals(
        backend,
        buffers,
        torch.tensor(blocks, dtype=torch.int64, device=device).view(-1, ARRIVAL_WORDS),
        torch.tensor(sent, dtype=torch.int64, device=device).view(len(rows), width, 2),
    )
    expected = [int(group.arrive(*row)) for row in rows]
    assert matched.tolist() == expected
    assert_same(buffers, group)
    return {lane: rows for lane, rows in group.rows.items() if rows}


@BACKENDS
@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals(backend, seed):
    rng = random.Random(seed)
    rows = []
    for block in range(rng.randrange(8)):
        # Few values, so that parts of several copies are equal.
        pairs = [(rng.randrange(3), rng.randrange(3) - 1) for _ in range(rng.randrange(4))]
        now = rng.choice(pairs) if pairs and rng.random() < 0.4 else (rng.randrange(3), rng.randrange(3) - 1)
        unchanged = rng.randrange(3), rng.randrange(3)
        rows.append((block * 8, block * 8 + 5, rng.randrange(1, 9), pairs, now, unchanged))
    judged(backend, rows)


@BACKENDS
def test_unchanged_bytes_are_right_where_they_are_what_was_sent(backend):
    same = (Unchanged.REPLACED, Unchanged.REPLACED)
    assert judged(backend, [(0, 0, 8, [(5, 6), (7, 8)], (7, 8), same)]) == {}


@BACKENDS
def test_each_part_is_lost_by_itself(backend):
    rows = judged(backend, [(8, 16, 8, [(5, 6)], (5, 9), (Unchanged.SAME, Unchanged.SAME))])
    assert rows == {(oracle.HEAD, oracle.LOST_LOAD): [(8, 16, -1, 2, 6, 9)]}


@BACKENDS
def test_without_records_only_what_cannot_be_right_is_lost(backend):
    unknown = [(16, 0, 8, [], (4, 4), (Unchanged.SAME, Unchanged.REPLACED))]
    rows = judged(backend, unknown)
    assert rows == {(oracle.HEAD, oracle.LOST_LOAD): [(16, 0, -1, 2, 4, 4)]}


def test_arguments_of_another_shape_are_refused():
    buffers = allocate_buffers(SLOTS, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(KernelArgumentError, match="one row per block"):
        judge_arrivals(Backend.TORCH, buffers, torch.zeros((2, 3), dtype=torch.int64), torch.zeros((2, 1, 2)))
    blocks = torch.zeros((2, ARRIVAL_WORDS), dtype=torch.int64)
    with pytest.raises(KernelArgumentError, match="of each copy"):
        judge_arrivals(Backend.TORCH, buffers, blocks, torch.zeros((2, 1, 2)))
