"""Long prefills, floods of violations, empty batches, refused arguments."""

import dataclasses
import itertools

import pytest
import torch

from canary_kernels import layout
from canary_kernels.buffers import RowBatch, allocate_buffers
from canary_kernels.checks import Backend, KernelArgumentError
from canary_kernels.fingerprint import compare_slots, complete_slots, plan_fingerprint
from canary_kernels.hashing import chain_of
from canary_kernels.layout import CHAIN, IDENTITY, STATE_MASK, Phase, RealData, Reason, RecordState, lane
from canary_kernels.verify import verify_list, verify_rows
from canary_kernels.write import write_identities
from tests.kernels.scenes import assert_same, device_of, random_scene

BACKENDS = pytest.mark.parametrize("backend", list(Backend))


def forward(tokens: torch.Tensor, prefix: list[int], extend: list[int], device: str) -> RowBatch:
    """Requests in consecutive slots: row r holds the slots r * width, r * width + 1, ..."""
    table = torch.arange(tokens.numel()).view(tokens.shape)
    new = [(r, slice(p, p + n)) for r, (p, n) in enumerate(zip(prefix, extend, strict=True))]
    digests = [chain_of(tokens[r, :p])[-1] for r, p in enumerate(prefix)]
    columns = {
        "slot_table": table,
        "rows": torch.arange(len(prefix)),
        "starts": torch.zeros(len(prefix), dtype=torch.int64),
        "prefix_lens": torch.tensor(prefix),
        "extend_lens": torch.tensor(extend),
        "token_starts": torch.tensor([0, *extend]).cumsum(0),
        "digests": torch.stack(digests),
        "input_ids": torch.cat([tokens[place] for place in new]),
        "positions": torch.cat([torch.arange(tokens.shape[1])[part] for _, part in new]),
        "out_slots": torch.cat([table[place] for place in new]),
    }
    return RowBatch(page_size=1, **{name: column.to(device) for name, column in columns.items()})


@BACKENDS
@pytest.mark.parametrize("with_digests", [True, False])
def test_long_prefills_chain_across_chunks_and_forwards(backend, with_digests):
    device = device_of(backend)
    tokens = torch.arange(2 * 2200).view(2, 2200) * 7919 % 128000
    ends = [[0, 0], [2060, 1], [2061, 2], [2200, 70]]
    buffers = allocate_buffers(tokens.numel(), torch.zeros(1, dtype=torch.int64, device=device))
    for prefix, end in itertools.pairwise(ends):
        batch = forward(tokens, prefix, [e - p for p, e in zip(prefix, end, strict=True)], device)
        batch = batch if with_digests else dataclasses.replace(batch, digests=None)
        write_identities(backend, buffers, batch)
        verify_rows(backend, buffers, batch, Phase.HEAD)
        pending = (buffers.records[:, IDENTITY] >> 32) & STATE_MASK == RecordState.PENDING
        # As complete_slots does; thousands of slots are too slow to interpret.
        buffers.records[:, IDENTITY] ^= pending.long() * layout.PENDING_TO_COMPLETE
        verify_rows(backend, buffers, batch, Phase.TAIL)
    counters = buffers.counters.tolist()
    assert counters[: layout.NUM_LANES] == [0] * layout.NUM_LANES
    assert counters[layout.COUNT_WRITTEN] == sum(ends[-1])
    assert counters[layout.COUNT_VERIFIED + Phase.TAIL] == sum(map(sum, ends))
    chains = buffers.records[:, CHAIN].cpu().view(tokens.shape)
    for r, end in enumerate(ends[-1]):
        assert torch.equal(chains[r, :end], chain_of(tokens[r, : end - 1]))


@BACKENDS
def test_flood_keeps_the_first_row_whole_rows_and_every_count(backend):
    device = device_of(backend)
    tokens = torch.arange(600).view(1, 600)
    buffers = allocate_buffers(600, torch.ones(1, dtype=torch.int64, device=device), lane_rows=8)
    slots = torch.arange(600, device=device)
    index = lane(Phase.SWEEP, Reason.UNWRITTEN)
    verify_list(backend, buffers, slots[:3], slots[:3] + 70, slots[:3] - 1, Phase.SWEEP)
    kept = buffers.violations[index, 0].tolist()
    for step in (1, 2):
        buffers.clock.fill_(step)
        verify_rows(backend, buffers, forward(tokens, [600], [0], device), Phase.HEAD)
        verify_list(backend, buffers, slots, slots + 70, slots - 1, Phase.SWEEP)
        assert buffers.counters[index] == 3 + 600 * step
        log = buffers.violations[index].tolist()
        assert log[0] == kept
        for place, row in enumerate(log[1:]):
            assert (row[layout.ROW_EVENT] - 2) % 7 == place
            assert row[layout.ROW_SLOT] + 70 == row[layout.ROW_POSITION]
            assert row[layout.ROW_STEP] == step
    assert len({row[layout.ROW_SLOT] for row in log[1:]}) == 7


@BACKENDS
def test_a_log_row_is_written_once_per_step(backend):
    device = device_of(backend)
    buffers = allocate_buffers(40, torch.full((1,), 5, dtype=torch.int64, device=device), lane_rows=8)
    slots = torch.arange(40, device=device)
    for part in (slots[:8], slots[8:20]):
        verify_list(backend, buffers, part, part, part - 1, Phase.SWEEP)
    index = lane(Phase.SWEEP, Reason.UNWRITTEN)
    assert buffers.counters[index] == 20
    assert sorted(buffers.violations[index, :, layout.ROW_SLOT].tolist()) == list(range(8))


@BACKENDS
def test_empty_batches_still_count_a_run(backend):
    device = device_of(backend)
    scene = next(s for s in map(random_scene, range(100)) if s.batch.rows.shape[0] == 0)
    buffers, batch = scene.buffers(backend), scene.batch_on(backend)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    plan = plan_fingerprint([], RealData.NONE, device)
    group, plain = scene.oracle()
    write_identities(backend, buffers, batch)
    verify_rows(backend, buffers, batch, Phase.HEAD)
    complete_slots(backend, buffers, plan, nothing)
    verify_rows(backend, buffers, batch, Phase.TAIL)
    verify_list(backend, buffers, nothing, nothing, nothing, Phase.SWEEP)
    compare_slots(backend, buffers, plan, nothing, Phase.SWEEP)
    compare_slots(backend, buffers, plan, nothing, Phase.PATROL)
    group.write(plain)
    group.verify_rows(plain, Phase.HEAD)
    group.complete([], [], covered=False)
    group.verify_rows(plain, Phase.TAIL)
    group.verify_list([], [], [], Phase.SWEEP)
    group.compare([], [], False, Phase.SWEEP)
    group.compare([], [], False, Phase.PATROL)
    assert_same(buffers, group)


@BACKENDS
def test_lengths_beyond_the_table_are_cut(backend):
    device = device_of(backend)
    tokens = torch.arange(20).view(1, 20)
    buffers = allocate_buffers(20, torch.ones(1, dtype=torch.int64, device=device))
    batch = forward(tokens, [20], [0], device)
    batch = dataclasses.replace(batch, prefix_lens=batch.prefix_lens + (1 << 40), digests=None)
    verify_rows(backend, buffers, batch, Phase.HEAD)
    assert buffers.counters[lane(Phase.HEAD, Reason.UNWRITTEN)] == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_table": torch.zeros(4, 6, dtype=torch.int64).T}, "contiguous last axis"),
        ({"slot_table": torch.zeros(4, 6)}, "slot_table is torch.float32"),
        ({"page_size": 0}, "page_size is 0"),
        ({"starts": torch.zeros(9, dtype=torch.int64)}, r"starts is torch.int64 \[9\]"),
        ({"out_slots": torch.zeros(9, dtype=torch.int64)}, "length 3"),
        ({"digests": torch.zeros(1, dtype=torch.int64, device="meta")}, "on meta"),
    ],
)
def test_inconsistent_batches_are_refused(change, message):
    batch = dataclasses.replace(forward(torch.arange(6).view(1, 6), [3], [3], "cpu"), **change)
    buffers = allocate_buffers(6, torch.zeros(1, dtype=torch.int64))
    for call in (
        lambda: write_identities(Backend.TORCH, buffers, batch),
        lambda: verify_rows(Backend.TORCH, buffers, batch, Phase.HEAD),
    ):
        with pytest.raises(KernelArgumentError, match=message):
            call()


def test_unfit_buffers_are_refused():
    clock = torch.zeros(1, dtype=torch.int64)
    slots = torch.zeros(1, dtype=torch.int64)
    good = allocate_buffers(4, clock)
    for buffers, message in (
        (allocate_buffers(4, clock, lane_rows=1), "at least 2"),
        (dataclasses.replace(good, records=good.records.int()), "the rule is int64"),
        (allocate_buffers(4, clock.to("meta")), "use Backend.TRITON"),
    ):
        with pytest.raises(KernelArgumentError, match=message):
            verify_list(Backend.TORCH, buffers, slots, slots, slots, Phase.SWEEP)
    with pytest.raises(KernelArgumentError, match=r"previous is torch.int64 \[2\]"):
        verify_list(Backend.TORCH, good, slots, slots, torch.zeros(2, dtype=torch.int64), Phase.SWEEP)


def test_counters_fit_their_words():
    """A reason more moves every counter after the lanes; words end with the last of them at the latest."""
    assert layout.COUNT_UNCOMPLETED < layout.COUNTER_WORDS
