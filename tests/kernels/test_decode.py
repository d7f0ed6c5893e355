"""What is kept of a batch that decodes, and what is known of its tokens, step after step."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from canary_kernels.checks import Backend, KernelArgumentError
from canary_kernels.decode import DecodeMemory, DecodeStep, Known, keep_decode
from canary_kernels.hashing import chain_of
from tests.kernels.scenes import device_of

COLUMNS = "input_ids", "positions", "out_slots"


def memory_on(device, table, windows=False, most_added=1):
    memory = DecodeMemory.allocate(table.to(device), windows=windows, most_added=most_added)
    for tensor in (memory.table, memory.prefix_lens, memory.tokens, memory.known):
        tensor.fill_(-7)
    if windows:
        memory.windows.fill_(-7)
        memory.window_slots.fill_(-7)
    return memory


def host(device, *rows, most=4):
    """Columns of the host; on a GPU in pinned memory, which the kernel reads from there."""
    columns = torch.full((3, most), 99, dtype=torch.int64)
    for row, values in enumerate(rows):
        columns[row, : len(values)] = torch.tensor(values, dtype=torch.int64)
    return columns.pin_memory() if device == "cuda" else columns


def a_step(device, table, rows, lens, columns, kind=torch.int64):
    def column(values):
        return torch.tensor(values, dtype=kind, device=device)

    more = {name: column(range(10 * place, 10 * place + len(rows))) for place, name in enumerate(COLUMNS)}
    return DecodeStep(
        table=table.to(device), rows=column(rows), seq_lens=column(lens), host=columns, **more
    )  # fmt: skip


TABLE = torch.arange(40, dtype=torch.int32).view(4, 10)


@pytest.mark.parametrize("backend", list(Backend))
def test_rows_up_to_their_lengths_and_nothing_else(backend):
    device = device_of(backend)
    memory = memory_on(device, TABLE)
    given = host(device, [5, 6, 7], [1, 2, 3], [8, 9, 10])
    keep_decode(backend, memory, a_step(device, TABLE, [2, 0, 4], [3, 1, 2], given), Known.GIVEN)
    rest = [-7] * 10
    assert memory.table.tolist() == [[20, 21, 22, *rest[3:]], [0, *rest[1:]], [-1, -1, *rest[2:]], rest]
    assert memory.prefix_lens.tolist() == [2, 0, 1, -7]
    assert memory.tokens.tolist() == [[0, 1, 2, -7], [10, 11, 12, -7], [20, 21, 22, -7]]
    assert memory.known.tolist() == [[5, 6, 7, -7], [1, 2, 3, -7], [8, 9, 10, -7]]


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("known", [Known.NEXT, Known.NEXT_BEFORE])
def test_a_token_more_of_each(backend, known):
    device, lists = device_of(backend), [[5, 6, 7], [8]]
    memory = memory_on(device, TABLE)
    chains = [chain_of(torch.tensor(tokens)) for tokens in lists]
    before = [int(chain[-2]) for chain in chains]
    columns = host(device, [0, 0], [len(tokens) - 1 for tokens in lists], before)
    keep_decode(backend, memory, a_step(device, TABLE, [1, 2], [3, 1], columns), Known.GIVEN)
    newest = host(device, [tokens[-1] for tokens in lists])
    keep_decode(backend, memory, a_step(device, TABLE, [1, 2], [3, 1], newest), known)
    after = [int(chain[-1]) for chain in chains]
    digests = after if known is Known.NEXT_BEFORE else before
    assert memory.known[:, :2].tolist() == [digests, [3, 1], after]
    assert set(memory.known[:, 2:].flatten().tolist()) == {-7}


@pytest.mark.parametrize("backend", list(Backend))
def test_slots_of_a_window_group(backend):
    """Of row 2, the first token has left the window. 31 and -3 are no slots, and 4 is no row."""
    device = device_of(backend)
    table = TABLE.clone()
    table[2, 1], table[0, 1] = 31, -3
    windows = torch.zeros(31, dtype=torch.int64, device=device)
    windows[torch.tensor([0, 20, 21, 22, 30])] = torch.tensor([5, 0, 6, 7, -1], device=device)
    windows[torch.tensor([10, 12])] = torch.tensor([3, 4], device=device)
    memory = memory_on(device, table, windows=True)
    step = a_step(device, table, [2, 0, 4], [3, 2, 2], host(device))
    out_slots = torch.tensor([10, 11, 12], device=device)
    keep_decode(backend, memory, step._replace(out_slots=out_slots, window_slots=windows), Known.GIVEN)
    rest = [-7] * 10
    assert memory.windows.tolist() == [[0, -1, 7, *rest[3:]], [5, -1, *rest[2:]], [-1, -1, *rest[2:]], rest]
    assert memory.table.tolist() == [[20, 31, 22, *rest[3:]], [0, -3, *rest[2:]], [-1, -1, *rest[2:]], rest]
    assert (memory.tokens[2].tolist(), memory.window_slots.tolist()) == ([10, 11, 12, -7], [3, -1, 4, -7])


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("width", [1, 3])
def test_drafts_that_the_lengths_do_not_have(backend, width):
    """Of rows 2 and 0, with 3 and 1 tokens before; row 0 reaches the end of the table with the second one."""
    device = device_of(backend)
    windows = torch.arange(100, 140, dtype=torch.int64, device=device)
    windows[torch.tensor([21, 5])] = 0
    memory = memory_on(device, TABLE, windows=True, most_added=4)
    given = host(device, [5, 6], [7, 8], [9, 10])
    step = a_step(device, TABLE, [2, 0], [3, 8], given)
    tokens = {name: torch.arange(2 * width, device=device) + 4 * place for place, name in enumerate(COLUMNS)}
    step = step._replace(**tokens, window_slots=windows, added=width, ahead=width)
    keep_decode(backend, memory, step, Known.GIVEN)
    ends = [3 + width, min(8 + width, 10)]
    for place, (row, end) in enumerate(zip((2, 0), ends, strict=True)):
        slots = TABLE[row, :end].tolist()
        assert memory.table[place].tolist() == [*slots, *[-7] * (10 - end)]
        assert memory.windows[place].tolist() == [*windows[slots].tolist(), *[-7] * (10 - end)]
    assert memory.prefix_lens.tolist() == [3, 8, -7, -7]
    for place, kept in enumerate(memory.tokens.tolist()):
        assert kept == [*range(4 * place, 4 * place + 2 * width), *[-7] * (16 - 2 * width)]
    written = [108 + slot if 108 + slot in windows.tolist() else -1 for slot in range(2 * width)]
    assert memory.window_slots.tolist() == [*written, *[-7] * (16 - 2 * width)]
    assert memory.known[:, :2].tolist() == [[5, 6], [7, 8], [9, 10]]


def test_drafts_without_room_are_refused():
    memory, step = (
        memory_on("cpu", TABLE, most_added=2),
        a_step("cpu", TABLE, [1, 2, 0], [3, 3, 3], host("cpu")),
    )
    nine = dict.fromkeys(COLUMNS, torch.arange(9))
    for more in ({"added": 3, **nine}, {"added": 2}):
        with pytest.raises(
            KernelArgumentError, match=r"tokens of 3 requests; the rule is . of each, and at most 8"
        ):
            keep_decode(Backend.TORCH, memory, step._replace(**more), Known.GIVEN)


@pytest.mark.parametrize(("windows", "why"), [(False, "without memory"), (True, "left out, with memory")])
def test_window_slots_have_memory_or_are_not_given(windows, why):
    memory = memory_on("cpu", TABLE, windows)
    given = None if windows else torch.zeros(3, dtype=torch.int64)
    step = a_step("cpu", TABLE, [1], [2], host("cpu"))._replace(window_slots=given)
    with pytest.raises(KernelArgumentError, match=f"window slots {why} for them; the rule is both or none"):
        keep_decode(Backend.TORCH, memory, step, Known.GIVEN)


@pytest.mark.parametrize("backend", list(Backend))
def test_lengths_that_the_table_cannot_have(backend):
    device = device_of(backend)
    memory = memory_on(device, TABLE)
    step = a_step(device, TABLE, [-1, 3, 1], [2, -4, 12], host(device))
    keep_decode(backend, memory, step, Known.GIVEN)
    assert memory.table.tolist() == [[-1, -1, *[-7] * 8], [-7] * 10, list(range(10, 20)), [-7] * 10]
    assert memory.prefix_lens.tolist() == [1, -5, 11, -7]


@pytest.mark.parametrize("backend", list(Backend))
def test_a_batch_of_none(backend):
    device = device_of(backend)
    memory = memory_on(device, TABLE)
    keep_decode(backend, memory, a_step(device, TABLE, [], [], host(device)), Known.GIVEN)
    for tensor in (memory.table, memory.prefix_lens, memory.tokens, memory.known):
        assert set(tensor.flatten().tolist()) == {-7}


def test_a_batch_without_room_is_refused():
    memory, five = memory_on("cpu", TABLE), [1, 2, 3, 0, 1]
    with pytest.raises(KernelArgumentError, match="a batch of 5 requests; the rule is at most 4"):
        keep_decode(Backend.TORCH, memory, a_step("cpu", TABLE, five, five, host("cpu")), Known.GIVEN)


@settings(max_examples=15)
@given(backend=st.sampled_from(list(Backend)), seed=st.integers(0, 2**32))
def test_a_batch_that_decodes_for_many_steps(backend, seed):
    """Rows longer than a program's block; engines' integers of either size."""
    draw, device = random.Random(seed), device_of(backend)
    requests, width = draw.randrange(1, 6), draw.choice([40, 1500, 9000])
    kind = draw.choice([torch.int32, torch.int64])
    table = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**31 - 1, (requests + 1, width)))
    table = table.to(draw.choice([torch.int32, torch.int64]))
    windows = torch.from_numpy(np.random.default_rng(seed).permutation(3 * width))
    windows = windows.to(device) if draw.random() < 0.5 else None
    memory = memory_on(device, table, windows is not None)
    lists = [[draw.randrange(200_000) for _ in range(draw.randrange(1, width - 12))] for _ in range(requests)]
    rows, late = draw.sample(range(requests + 1), requests), draw.random() < 0.5
    for number in range(6):
        for tokens in lists:
            tokens.append(draw.randrange(200_000))
        chains = [chain_of(torch.tensor(tokens)) for tokens in lists]
        after = [int(chain[-1]) for chain in chains]
        before = after if late else [int(chain[-2]) for chain in chains]
        sizes = [len(tokens) for tokens in lists]
        if number in (0, 3):  # the batch changed
            known, columns = Known.GIVEN, host(device, before, sizes, after, most=requests + 1)
        else:
            known = Known.NEXT_BEFORE if late else Known.NEXT
            columns = host(device, [tokens[-1] for tokens in lists], most=requests + 1)
        lens = [size + late for size in sizes]
        step = a_step(device, table, rows, lens, columns, kind)._replace(window_slots=windows)
        keep_decode(backend, memory, step, known)
        assert memory.known[:, :requests].tolist() == [before, sizes, after]
        assert memory.prefix_lens[:requests].tolist() == [length - 1 for length in lens]
        for place, (row, length) in enumerate(zip(rows, lens, strict=True)):
            assert torch.equal(memory.table[place, :length].cpu(), table[row, :length])
            if windows is not None:
                of = windows.cpu()[table[row, :length].to(torch.int64).clamp(max=windows.numel() - 1)]
                assert torch.equal(memory.windows[place, :length].cpu().to(torch.int64), of)
