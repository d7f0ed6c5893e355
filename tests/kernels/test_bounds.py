"""Lengths, rows and slots that cannot be: they are no index anywhere, and they are reported."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from canary_kernels.buffers import allocate_buffers
from canary_kernels.checks import Backend
from canary_kernels.digest import DigestMemory, InputTokens, TokenLists, follow_inputs, follow_lists
from canary_kernels.drafts import DraftMemory, DraftReserve, TargetStep, keep_target
from canary_kernels.fingerprint import compare_slots, complete_slots, hash_slots, plan_fingerprint
from canary_kernels.layout import (
    COUNT_UNCOMPLETED,
    COUNT_UNHASHED,
    COUNT_WRITTEN,
    ROW_ACTUAL,
    ROW_EXPECTED,
    ROW_SLOT,
    Phase,
    RealData,
    Reason,
    lane,
)
from canary_kernels.verify import verify_list, verify_rows
from canary_kernels.write import write_identities
from canary_obs.runtime.prefix_slots import prefix_slots
from tests.kernels import pools
from tests.kernels.scenes import device_of
from tests.kernels.test_limits import forward

BACKENDS = pytest.mark.parametrize("backend", list(Backend))
FAR, HUGE = 1 << 40, (1 << 31) - 1
WRITE_POSITION = lane(Phase.HEAD, Reason.WRITE_POSITION)


def changed(batch, name: str, value: int, dtype=torch.int64):
    """The batch with one element of a column, that of the second request, replaced."""
    column = getattr(batch, name).to(dtype).clone()
    column[1] = value
    return dataclasses.replace(batch, **{name: column})


@BACKENDS
@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("prefix_lens", -1, torch.int64), ("prefix_lens", FAR, torch.int64),
        ("prefix_lens", HUGE, torch.int32), ("prefix_lens", -HUGE, torch.int32),
        ("prefix_lens", 13, torch.int64),
        ("extend_lens", -1, torch.int64), ("extend_lens", FAR, torch.int64),
        ("extend_lens", HUGE, torch.int32), ("extend_lens", 6, torch.int64),
        ("token_starts", -1, torch.int64), ("token_starts", FAR, torch.int64),
        ("token_starts", HUGE, torch.int32), ("token_starts", 7, torch.int64),
    ],
)  # fmt: skip
def test_impossible_lengths_are_reported_and_never_an_index(backend, name, value, dtype):
    device = device_of(backend)
    tokens = torch.arange(36).view(3, 12)
    buffers = allocate_buffers(36, torch.ones(1, dtype=torch.int64, device=device))
    plain = dataclasses.replace(forward(tokens, [0, 0, 0], [4, 3, 2], device), digests=None)
    batch = changed(plain, name, value, dtype)
    write_identities(backend, buffers, batch)
    assert buffers.counters[WRITE_POSITION] == 1
    row = buffers.violations[WRITE_POSITION, 0].tolist()
    prefix = value if name == "prefix_lens" else 0
    assert (row[ROW_SLOT], row[ROW_EXPECTED], row[ROW_ACTUAL]) == (-1, 12, prefix)
    assert buffers.counters[COUNT_WRITTEN] == 4 + 2  # the others are written as always
    for phase in (Phase.HEAD, Phase.TAIL):
        verify_rows(backend, buffers, batch, phase)
    prefix_slots(batch)


@BACKENDS
@pytest.mark.parametrize("row", [-1, 3, FAR, -FAR])
def test_rows_outside_the_table_are_padding(backend, row):
    device = device_of(backend)
    tokens = torch.arange(36).view(3, 12)
    buffers = allocate_buffers(36, torch.ones(1, dtype=torch.int64, device=device))
    plain = forward(tokens, [0, 0, 0], [4, 3, 2], device)
    batch = changed(changed(plain, "rows", row), "prefix_lens", FAR)
    write_identities(backend, buffers, batch)
    for phase in (Phase.HEAD, Phase.TAIL):
        verify_rows(backend, buffers, batch, phase)
    assert buffers.counters[COUNT_WRITTEN] == 4 + 2
    assert buffers.counters[WRITE_POSITION] == 0
    assert prefix_slots(batch).numel() == 0


@BACKENDS
@pytest.mark.parametrize("start", [FAR, -FAR, HUGE])
def test_starts_of_windows_are_cut(backend, start):
    device = device_of(backend)
    buffers = allocate_buffers(36, torch.ones(1, dtype=torch.int64, device=device))
    batch = changed(forward(torch.arange(36).view(3, 12), [2, 2, 2], [0, 0, 0], device), "starts", start)
    verify_rows(backend, buffers, batch, Phase.HEAD)
    seen = buffers.counters[lane(Phase.HEAD, Reason.UNWRITTEN)]
    assert seen == (6 if start < 0 else 4)
    assert prefix_slots(batch).numel() == seen


@BACKENDS
def test_slots_outside_the_pool_are_counted_and_not_read(backend):
    device = device_of(backend)
    pool = pools.separate(device)
    plan = plan_fingerprint(pool.sources, RealData.ALL, device)
    buffers = allocate_buffers(pools.SLOTS, torch.ones(1, dtype=torch.int64, device=device))
    slots = torch.tensor([-1, -FAR, FAR, pools.SLOTS, HUGE, 1 << 62], device=device)
    complete_slots(backend, buffers, plan, slots)
    compare_slots(backend, buffers, plan, slots, Phase.SWEEP)
    verify_list(backend, buffers, slots, slots, slots, Phase.SWEEP)
    assert hash_slots(backend, plan, slots).tolist() == [[0, 0]] * 6
    assert buffers.counters[COUNT_UNCOMPLETED] == buffers.counters[COUNT_UNHASHED + Phase.SWEEP] == 6
    assert buffers.counters[lane(Phase.SWEEP, Reason.UNWRITTEN)] == 4


DIGESTS = pytest.mark.parametrize("backend", [Backend.TORCH, Backend.TRITON])


@DIGESTS
@pytest.mark.parametrize(
    ("row", "computed"), [(-1, 3), (9, 3), (FAR, 3), (1, -5), (1, 7), (1, HUGE), (1, FAR)]
)
def test_digests_of_lists_that_cannot_be(backend, row, computed):
    device = device_of(backend)
    memory = DigestMemory.allocate(4, torch.device(device))
    tokens = torch.arange(24, dtype=torch.int32, device=device).view(4, 6)
    rows = torch.tensor([0, row, 2], device=device)
    lengths = torch.tensor([2, computed, 6, 0], device=device)
    starts = torch.tensor([0, 1, 2, 3], device=device)
    lists = TokenLists(rows=rows, tokens=tokens, computed=lengths, token_starts=starts)
    follow_lists(backend, memory, lists)
    assert memory.counts.tolist() == [2, 0, 6, 0]
    assert memory.digests[1] == 0
    assert memory.prefix_lens[:3].tolist() == [2, -1, 6]  # which the write reports


@DIGESTS
@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize(
    ("row", "starts"),
    [(-1, [0, 2, 4]), (FAR, [0, 2, 4]), (1, [0, 2, 9]), (1, [0, 2, 5]), (1, [0, 2, -1]), (1, [0, 2, FAR])],
)
def test_digests_of_inputs_that_cannot_be(backend, tail, row, starts):
    device = device_of(backend)
    memory = DigestMemory.allocate(4, torch.device(device), tail)
    places = torch.tensor([[0, row], [1, 1], [5, 6]], device=device)
    fed = InputTokens(
        places=places,
        input_ids=torch.arange(4, dtype=torch.int32, device=device),
        token_starts=torch.tensor(starts, device=device),
        prefix_lens=torch.tensor([0, 0], device=device),
    )
    follow_inputs(backend, memory, fed)
    assert memory.digests[:2].tolist() == [5, 6]
    assert memory.chains[1:].tolist() == [0, 0, 0]
    assert places[1].tolist() == [0, 0]


@DIGESTS
def test_drafts_beyond_the_table_have_no_slot(backend):
    device = device_of(backend)
    kinds = torch.int64, torch.int64, torch.int64
    reserve = DraftReserve(ahead=2, limit=1 << 60, page_size=1)
    memory = DraftMemory.allocate(4, 8, reserve, kinds, torch.device(device))

    def column(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device)

    step = TargetStep(
        prefix_lens=column(1, -FAR, FAR, HUGE), extend_lens=column(1, 1, 1, 1),
        token_starts=column(0, 1, 2, 3, 4), input_ids=column(1, 2, 3, 4), positions=column(1, 2, 3, 4),
        slot_table=torch.arange(16, device=device).view(4, 4), out_slots=column(1, 5, 9, 13),
    )  # fmt: skip
    assert keep_target(backend, memory, step).tolist() == [1, 5, 9, 13, 2, 3, -1, -1, -1, -1, -1, -1]
