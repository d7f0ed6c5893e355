"""A forward's clock, and the columns that come with it from the row of the ring that its number names."""

import random

import pytest
import torch
from hypothesis import given, settings, strategies as st

from canary_kernels.checks import Backend, KernelArgumentError
from canary_kernels.forward_start import RING_ROWS, HostColumns, start_forward
from canary_kernels.forward_start.columns import address_of
from canary_kernels.layout import TICK_BITS
from tests.kernels.scenes import device_of

MOST = 700  # more than a block of the kernel
ONE_FORWARD = (1 << TICK_BITS) + 1
BACKENDS = st.sampled_from(list(Backend))


@settings(max_examples=30)
@given(BACKENDS, st.integers(0, 2**32), st.sampled_from([torch.int32, torch.int64]))
def test_every_forward_gets_its_own_columns(backend, seed, kind):
    """Rows of the ring are filled ahead, as far as the host may be ahead of the device."""
    draw, device = random.Random(seed), torch.device(device_of(backend))
    host, first = HostColumns.allocate(MOST, device), draw.randrange(1000)
    clock = torch.full((1,), first << TICK_BITS, dtype=torch.int64, device=device)
    steps, wanted = range(first + 1, first + 7), {}
    for step in (*steps, None, None):
        if step is not None:
            count = draw.randrange(1, MOST + 1)
            rows = torch.randint(0, 1 << 20, (count,), generator=torch.Generator().manual_seed(step))
            given_rows = rows.to(device, kind) if draw.random() < 0.7 else None
            known = torch.randint(
                -(2**62), 2**62, (2, count), generator=torch.Generator().manual_seed(~step & 255)
            )
            address, values = host.row(step)
            address[0] = 0 if given_rows is None else address_of(given_rows)
            values[:, :count] = known.numpy()
            wanted[step] = count, rows, given_rows, known
        due = first + 7 - len(wanted) if step is None else step - 2
        if due in wanted:
            count, rows, given_rows, known = wanted.pop(due)
            before = host.rows.clone()
            start_forward(backend, clock, ONE_FORWARD, host, count)
            assert int(clock) >> TICK_BITS == due
            assert torch.equal(host.known[:, :count].cpu(), known)
            expected = before[:count].cpu() if given_rows is None else rows
            assert torch.equal(host.rows[:count].cpu(), expected)
            assert torch.equal(host.rows[count:], before[count:])


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_known_tokens_are_taken_anew_without_the_rows(backend, kind):
    device = torch.device(device_of(backend))
    host, clock = HostColumns.allocate(4, device), torch.zeros(1, dtype=torch.int64, device=device)
    address, values = host.row(1)
    rows = torch.tensor([7, 8, 9], dtype=kind, device=device)
    address[0], values[:, :3] = address_of(rows), 1
    start_forward(backend, clock, ONE_FORWARD, host, 3)
    rows += 1
    values[:, :3] = 2
    start_forward(backend, clock, 0, host, 3, rows=False)
    assert (host.known[:, :3].tolist(), host.rows.tolist()) == ([[2] * 3] * 2, [7, 8, 9, 0])
    start_forward(backend, clock, 0, host, 3)
    assert host.rows.tolist() == [8, 9, 10, 0]


@pytest.mark.parametrize("backend", list(Backend))
def test_a_clock_alone(backend):
    clock = torch.full((1,), 5, dtype=torch.int64, device=device_of(backend))
    for _ in range(2):
        start_forward(backend, clock, 3)
    assert int(clock) == 11


@pytest.mark.parametrize("backend", list(Backend))
def test_what_has_no_room_is_refused(backend):
    device = torch.device(device_of(backend))
    host, clock = HostColumns.allocate(2, device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(KernelArgumentError, match="3 requests; the rule is at most 2"):
        start_forward(backend, clock, 1, host, 3)
    with pytest.raises(TypeError, match="int32 or int64"):
        address_of(torch.zeros(2))
    assert RING_ROWS >= 2
