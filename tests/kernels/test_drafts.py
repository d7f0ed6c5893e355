"""What is kept of a target's forward: copies, and the slots that its draft may write, worked out by hand."""

import random

import pytest
import torch
from hypothesis import given, settings, strategies as st

from canary_kernels.checks import Backend, KernelArgumentError
from canary_kernels.drafts import DraftMemory, DraftReserve, TargetStep, keep_target
from tests.kernels.scenes import device_of

INPUTS = "prefix_lens", "extend_lens", "token_starts", "input_ids", "positions"
KINDS = torch.int32, torch.int32, torch.int64


def memory_on(device, reach, requests=3, tokens=8, kinds=KINDS):
    memory = DraftMemory.allocate(requests, tokens, reach, kinds, torch.device(device))
    for name in (*INPUTS, "slots"):
        getattr(memory, name).fill_(-7)
    return memory


def two_requests(device):
    """Tokens 3 and 4 of the first, 9 and 10 of the second, in pages of 4; no table row is the third's."""

    def column(values, kind=torch.int32):
        return torch.tensor(values, dtype=kind, device=device)

    return TargetStep(
        prefix_lens=column([3, 9]),
        extend_lens=column([2, 2]),
        token_starts=column([0, 2, 4]),
        input_ids=column([50, 51, 60, 61]),
        positions=column([3, 4, 9, 10], torch.int64),
        slot_table=column([[3, 1, 5], [2, 7, 6], [0, 0, 0]]),
        out_slots=column([15, 4, 25, 26], torch.int64),
    )


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize(
    ("ahead", "limit", "behind"),
    [
        # Positions 5 and 6 of the first lie in page 1; 11 of the second in page 6, and 12 has no page.
        (2, 12, [5, 6, 27, 27]),
        (2, 14, [5, 6, 27, -1]),
        (1, 12, [5, 27]),
        (0, 12, []),
        (4, 12, [5, 6, 7, 20, 27, 27, 27, 27]),
    ],
)
def test_slots_that_drafting_may_write(backend, ahead, limit, behind):
    device = device_of(backend)
    memory = memory_on(device, DraftReserve(ahead=ahead, limit=limit, page_size=4))
    written = keep_target(backend, memory, two_requests(device))
    assert written.tolist() == [15, 4, 25, 26, *behind]
    assert written.data_ptr() == memory.slots.data_ptr()
    assert set(memory.slots[len(written) :].tolist()) <= {-7}


@pytest.mark.parametrize("backend", list(Backend))
def test_inputs_are_copied_and_nothing_else_is_touched(backend):
    device = device_of(backend)
    memory, step = memory_on(device, DraftReserve(ahead=2, limit=12, page_size=4)), two_requests(device)
    keep_target(backend, memory, step)
    for name in INPUTS:
        kept, given = getattr(memory, name), getattr(step, name)
        assert kept.tolist() == given.tolist() + [-7] * (len(kept) - len(given)), name


@pytest.mark.parametrize("backend", list(Backend))
def test_a_step_of_nothing(backend):
    device = device_of(backend)
    memory = memory_on(device, DraftReserve(ahead=2, limit=12, page_size=4))
    step = two_requests(device)
    nothing = {name: getattr(step, name)[:0] for name in (*INPUTS, "out_slots") if name != "token_starts"}
    empty = TargetStep(token_starts=step.token_starts[:1], slot_table=step.slot_table, **nothing)
    assert keep_target(backend, memory, empty).tolist() == []
    assert memory.token_starts.tolist() == [0, -7, -7, -7]
    assert set(memory.slots.tolist()) == set(memory.prefix_lens.tolist()) == {-7}


@settings(max_examples=20)
@given(backend=st.sampled_from(list(Backend)), seed=st.integers(0, 2**32))
def test_larger_steps_than_a_program_s_block(backend, seed):
    draw, device = random.Random(seed), device_of(backend)
    page_size, width, ahead = draw.choice([1, 3, 16]), draw.randrange(1, 30), draw.randrange(5)
    limit, requests = draw.randrange(1, page_size * width + 9), draw.randrange(300)
    kinds = draw.choice([(torch.int32, torch.int32, torch.int64), (torch.int64, torch.int64, torch.int32)])
    prefix = [draw.randrange(-3, limit) for _ in range(requests)]
    extend = [draw.randrange(4) for _ in range(requests)]
    tokens = sum(extend)
    # Rows of a wider table, as vLLM's are.
    table = [[draw.randrange(2**30) for _ in range(width)] for _ in range(requests + 2)]
    wide = torch.tensor([[*row, 5, 5] for row in table], dtype=draw.choice([torch.int32, torch.int64]))
    slots = [draw.randrange(-1, 2**40) for _ in range(tokens)]
    numbers = [draw.randrange(2**31) for _ in range(tokens)]
    step = TargetStep(
        prefix_lens=torch.tensor(prefix, dtype=kinds[0], device=device),
        extend_lens=torch.tensor(extend, dtype=kinds[0], device=device),
        token_starts=torch.tensor([0, *extend], dtype=kinds[0], device=device).cumsum(0, dtype=kinds[0]),
        input_ids=torch.tensor(numbers, dtype=kinds[1], device=device),
        positions=torch.tensor(numbers[::-1], dtype=kinds[2], device=device),
        slot_table=wide.to(device)[:, :width],
        out_slots=torch.tensor(slots, dtype=torch.int64, device=device),
    )
    behind = []
    for row, first, count in zip(table, prefix, extend, strict=False):
        for place in range(first + count, first + count + ahead):
            last = min(place, limit - 1)
            known = 0 <= last < width * page_size
            behind.append(row[last // page_size] * page_size + last % page_size if known else -1)
    reach = DraftReserve(ahead=ahead, limit=limit, page_size=page_size)
    memory = memory_on(device, reach, requests + 2, tokens + 3, kinds)
    assert keep_target(backend, memory, step).tolist() == slots + behind
    for name in INPUTS:
        given = getattr(step, name)
        assert torch.equal(getattr(memory, name)[: given.shape[0]], given), name


@pytest.mark.parametrize("backend", list(Backend))
def test_a_step_without_room_is_refused(backend):
    memory = memory_on(device_of(backend), DraftReserve(ahead=1, limit=12, page_size=4), requests=1)
    with pytest.raises(KernelArgumentError, match="2 requests and 4 tokens; the rule is at most 1 and 8"):
        keep_target(backend, memory, two_requests(device_of(backend)))
