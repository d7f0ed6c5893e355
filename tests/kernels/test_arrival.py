"""Blocks that were loaded, compared with what was sent and with before; in plain Python as well."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from canary_kernels import layout
from canary_kernels.arrival import (
    ARRIVAL_WORDS,
    Arrival,
    ArrivedLoad,
    Edge,
    Unchanged,
    WeighedLoad,
    fold_records,
    judge_arrivals,
    keep_arrivals,
    weigh_arrivals,
)
from canary_kernels.arrival.kernel import keep_kernel
from canary_kernels.arrival.op import put_together
from canary_kernels.buffers import allocate_buffers
from canary_kernels.checks import Backend, KernelArgumentError
from canary_kernels.hashing import word_keys
from canary_kernels.layout import RecordState
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


# Loads, before they are judged: the reference, whose faults are planted in runtime/test_loads.py, and the
# kernels.


def load_of(backend, seed, blocks=12):
    """Few values, so that slots are the same as before, or hold the same tokens, or nothing at all."""
    rng = random.Random(seed)
    size = rng.choice([1, 4, 64, 100])
    states = [RecordState.COMPLETE, RecordState.BASELINE, RecordState.ADOPTED, RecordState.EMPTY]

    def identity(state):
        position = rng.choice([0, 5]) if rng.random() < 0.1 else 5
        token = rng.choice([7, 8]) if rng.random() < 0.1 else 7
        return layout.sealed(token | (position << layout.STATE_BITS | int(state)) << 32, 3)

    old, identities, now = [], [], []
    for block in range(blocks):
        changed, state = rng.random() < 0.3, rng.choice(states)
        for offset in range(size):
            before = rng.choice([0, 6]) if rng.random() < 0.2 else 0
            after = [rng.choice([0, 6]) if changed else before for _ in range(2)]
            old += [identity(state), rng.choice([0, 3]) if rng.random() < 0.1 else 3 * (block % 2), before, 0]
            identities += [identity(RecordState.COMPLETE), block * size + offset]
            now += [after[0], after[1] if changed else 0]
    edges = []
    for _ in range(blocks):
        first = rng.randrange(size) if rng.random() < 0.3 else 0
        stop = rng.randrange(first, size + 1) if rng.random() < 0.3 else size
        edges.append((first, stop, rng.randrange(3), rng.randrange(1, size + 1)))
    slots = list(range(blocks * size))
    rng.shuffle(slots)
    slots[rng.randrange(len(slots))] = -1
    slots[rng.randrange(len(slots))] = blocks * size  # past the end of the pool
    shapes = {
        "slots": (slots, (blocks, size)),
        "old": (old, (blocks, size, 4)),
        "now": (now, (blocks, size, 2)),
    }
    shapes |= {"identities": (identities, (blocks, size, 2)), "edges": (edges, (blocks, 4))}
    shapes |= {"keys": (word_keys(0, size).tolist(), (size,)), "held": ([1, seed % 2], (2,))}
    device = device_of(backend)
    made = {name: torch.tensor(what, device=device).view(shape) for name, (what, shape) in shapes.items()}
    buffers = allocate_buffers(blocks * size, torch.zeros(1, dtype=torch.int64, device=device))
    return buffers, ArrivedLoad(**made)


@pytest.mark.parametrize("seed", range(8))
def test_blocks_are_weighed_alike(seed):
    found = [
        weigh_arrivals(backend, *load_of(backend, seed)).tolist()
        for backend in (Backend.TORCH, Backend.TRITON)
    ]
    assert found[0] == found[1]
    seen = {row[Arrival.UNCHANGED_K] for row in found[0]}
    assert len(seen) > 1 or seed not in {0, 2}, "nothing was told apart"


@pytest.mark.parametrize("seed", range(8))
def test_records_are_kept_alike(seed):
    found = []
    for backend in (Backend.TORCH, Backend.TRITON):
        buffers, load = load_of(backend, seed)
        matched = torch.arange(load.slots.shape[0], device=load.slots.device) % 2
        keep_arrivals(backend, buffers, load, matched)
        found.append((buffers.records.tolist(), load.slots.tolist()))
    assert found[0] == found[1]
    states = {oracle.Record.unpack(words).state for words in found[0][0]}
    assert states == {oracle.EMPTY, oracle.COMPLETE, oracle.BASELINE}


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("backend", list(Backend))
def test_a_load_that_was_weighed_is_judged_as_one_that_is_now(backend, keeps):
    found = []
    for early in (True, False):
        buffers, other = load_of(backend, 3)
        sent = torch.arange(other.slots.shape[0] * 2, device=other.slots.device).view(-1, 1, 2)
        WeighedLoad(backend, buffers, other, sent, keeps=True).judge()  # on a GPU, compiles
        for each in (buffers.records, buffers.counters, buffers.violations):
            each.zero_()
        _, load = load_of(backend, 2)
        if early:
            weighed = WeighedLoad(backend, buffers, load, sent, keeps=keeps)
            assert not buffers.counters.any(), "nothing was judged"
            weighed.judge()
        else:
            blocks = weigh_arrivals(backend, buffers, load)
            matched = judge_arrivals(backend, buffers, blocks, sent)
            if keeps:
                keep_arrivals(backend, buffers, load, matched)
        state = [each.tolist() for each in (buffers.records, buffers.counters, load.slots)]
        # A GPU's programs come in any order, and number the rows as they come.
        lanes = buffers.violations.tolist()
        numbers = [sorted(row[0] for row in lane) for lane in lanes]
        found.append([*state, numbers, [sorted(row[1:] for row in lane) for lane in lanes]])
    assert found[0] == found[1]
    assert any(found[0][1])


@pytest.mark.parametrize("keeps", [True, False])
def test_launches_that_are_put_together_have_what_is_given_now(keeps):
    """Of what a GPU has compiled; the interpreter compiles nothing."""
    buffers, load = load_of(Backend.TRITON, 2)
    blocks, count = weigh_arrivals(Backend.TRITON, buffers, load), load.slots.shape[0]
    sent = torch.zeros((count, 3, 2), dtype=torch.int64, device=blocks.device)
    given = load if keeps else None
    assert put_together(Backend.TRITON, buffers, blocks, sent, given) == (None, ())
    calls = []
    again = SimpleNamespace(again=lambda *what: lambda: calls.append(what))
    buffers.cache["arrival_kernel"] = buffers.cache[keep_kernel] = again
    matched, launches = put_together(Backend.TRITON, buffers, blocks, sent, given)
    assert calls == []
    for launch in launches:
        launch()
    judged, *kept = calls
    assert judged == ((count, 1), (blocks.data_ptr(), sent.data_ptr(), matched.data_ptr(), 3))
    columns = load.slots, load.identities, load.now, load.edges, matched
    addresses = tuple(map(torch.Tensor.data_ptr, columns))
    size = load.slots.shape[1]
    assert kept == ([((count, -(-size // 64)), (*addresses, size))] if keeps else [])
    assert put_together(Backend.TRITON, buffers, blocks, sent.mT, given) == (None, ())


@pytest.mark.parametrize("baselines", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_records_are_folded_alike(seed, baselines):
    found = []
    for backend in (Backend.TORCH, Backend.TRITON):
        buffers, load = load_of(backend, seed)
        keep_arrivals(backend, buffers, load, torch.ones_like(load.slots[:, 0]))
        slots = torch.roll(load.slots, seed % 3)  # of parts of several blocks
        found.append(fold_records(backend, buffers, slots, load.keys, baselines=baselines).tolist())
    assert found[0] == found[1]
    assert {row[0] for row in found[0]} == {0, 1} or seed not in {0, 2}


def test_baselines_are_folded_where_they_will_do():
    for backend in (Backend.TORCH, Backend.TRITON):
        buffers, load = load_of(backend, 0)
        load.edges[:, Edge.FIRST], load.edges[:, Edge.STOP] = 0, load.slots.shape[1]
        keep_arrivals(backend, buffers, load, torch.zeros_like(load.slots[:, 0]))
        held = load.slots[((load.slots >= 0) & (load.slots < buffers.num_slots)).all(1)]
        assert held.numel()
        without = fold_records(backend, buffers, held, load.keys)
        folds = fold_records(backend, buffers, held, load.keys, baselines=True)
        assert without[:, 0].tolist() == [0] * len(held)
        assert folds[:, 0].tolist() == [1] * len(held)
        assert torch.equal(folds[:, 1:], without[:, 1:])


def test_keys_of_other_blocks_are_refused():
    buffers, load = load_of(Backend.TORCH, 0)
    with pytest.raises(KernelArgumentError, match="and a key for each slot"):
        fold_records(Backend.TORCH, buffers, load.slots, load.keys[:-1])


def test_a_load_of_another_shape_is_refused():
    buffers, load = load_of(Backend.TORCH, 0)
    broken = ArrivedLoad(
        **{name: getattr(load, name) for name in load.__slots__} | {"now": load.now[:, :, :1]}
    )
    with pytest.raises(KernelArgumentError, match="give the columns of ArrivedLoad"):
        weigh_arrivals(Backend.TORCH, buffers, broken)
