"""Write and verify against the oracle: the same records, counters and violations from every backend."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from canary_kernels import layout
from canary_kernels.buffers import RowBatch, allocate_buffers
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import complete_slots, plan_fingerprint
from canary_kernels.layout import Phase, Reason, RecordState
from canary_kernels.verify import verify_list, verify_rows
from canary_kernels.write import reset_slots, write_identities
from tests.kernels.scenes import CHAINS, assert_same, device_of, random_scene
from tests.oracles import records as oracle
from tests.sizes import sized

every_backend = pytest.mark.parametrize("backend", list(Backend))
SHAPES = {"page_size": st.sampled_from([1, 4, 16, 64]), "dtype": st.sampled_from([torch.int32, torch.int64])}
SEEDS = st.integers(0, 2**32)


@every_backend
@settings(max_examples=sized(25, 8))
@given(seed=SEEDS, phase=st.sampled_from([Phase.HEAD, Phase.TAIL]), **SHAPES)
def test_verify_rows(backend, seed, phase, page_size, dtype):
    scene = random_scene(seed, page_size=page_size, dtype=dtype)
    group, batch = scene.oracle()
    buffers = scene.buffers(backend)
    verify_rows(backend, buffers, scene.batch_on(backend), phase)
    group.verify_rows(batch, phase)
    assert_same(buffers, group)


@every_backend
@pytest.mark.parametrize("only", [*CHAINS, "token", "position", "state", "digests", "known_digests", "bit"])
@settings(max_examples=sized(8, 3))
@given(seed=SEEDS, phase=st.sampled_from([Phase.HEAD, Phase.TAIL]))
def test_one_damage_is_seen(backend, only, seed, phase):
    scene = random_scene(seed, only=only)
    group, batch = scene.oracle()
    buffers = scene.buffers(backend)
    verify_rows(backend, buffers, scene.batch_on(backend), phase)
    group.verify_rows(batch, phase)
    assert_same(buffers, group)


@every_backend
@pytest.mark.parametrize("only", ["positions", "expected_ids", "state", "bit"])
@settings(max_examples=sized(8, 3))
@given(seed=SEEDS)
def test_one_wrong_input_is_seen(backend, only, seed):
    scene = random_scene(seed, only=only)
    group, batch = scene.oracle()
    buffers = scene.buffers(backend)
    write_identities(backend, buffers, scene.batch_on(backend))
    group.write(batch)
    assert_same(buffers, group)


@every_backend
@settings(max_examples=sized(25, 8))
@given(seed=SEEDS, **SHAPES)
def test_write_identities(backend, seed, page_size, dtype):
    scene = random_scene(seed, page_size=page_size, dtype=dtype)
    group, batch = scene.oracle()
    buffers = scene.buffers(backend)
    write_identities(backend, buffers, scene.batch_on(backend))
    group.write(batch)
    assert_same(buffers, group)


@every_backend
@pytest.mark.parametrize(("broken", "accused"), [(0, [0, 1]), (1, [1, 2]), (2, [2, 3]), (3, [3])])
def test_a_broken_chain_accuses_the_record_and_the_one_after_it(backend, broken, accused):
    """Four tokens are cached, no digest is known; one record has another chain, and a valid check."""
    tokens, column = (5, 6, 7, 8), {"device": device_of(backend), "dtype": torch.int64}
    buffers = allocate_buffers(4, torch.full((1,), 7, **column))
    for slot, token in enumerate(tokens):
        chain = oracle.digest_of(tokens[:slot]) ^ (slot == broken)
        buffers.records[slot] = torch.tensor(oracle.Record(token, slot, oracle.COMPLETE, chain).pack())
    batch = RowBatch(
        slot_table=torch.tensor([[0, 1, 2, 3]], **column), page_size=1, rows=torch.tensor([0], **column),
        starts=torch.tensor([0], **column), prefix_lens=torch.tensor([4], **column),
        extend_lens=torch.tensor([0], **column), token_starts=torch.tensor([0, 0], **column), digests=None,
        input_ids=torch.tensor([], **column), positions=torch.tensor([], **column),
        out_slots=torch.tensor([], **column),
    )  # fmt: skip
    verify_rows(backend, buffers, batch, Phase.HEAD)
    lane = layout.lane(Phase.HEAD, Reason.CHAIN)
    assert buffers.counters[lane] == buffers.counters[: layout.NUM_LANES].sum() == len(accused)
    rows = buffers.violations[lane, : len(accused), layout.ROW_SLOT].tolist()
    assert sorted(rows) == accused


@every_backend
@settings(max_examples=sized(25, 8))
@given(seed=SEEDS, data=st.data())
def test_verify_list(backend, seed, data):
    scene = random_scene(seed)
    group, batch = scene.oracle()
    listed = []
    for r in batch.live():
        for position in range(batch.prefix_lens[r]):
            previous = batch.slot(r, position - 1) if position else -1
            listed.append((batch.slot(r, position), position, previous))
    listed += data.draw(
        st.lists(st.tuples(st.integers(-1, 500), st.integers(0, 90), st.integers(-1, 500)), max_size=8)
    )
    columns = [torch.tensor([row[i] for row in listed], dtype=torch.int64) for i in range(3)]
    buffers = scene.buffers(backend)
    verify_list(backend, buffers, *(column.to(device_of(backend)) for column in columns), Phase.SWEEP)
    group.verify_list(*(column.tolist() for column in columns), Phase.SWEEP)
    assert_same(buffers, group)


@every_backend
@pytest.mark.parametrize("extend", [0, 1])
def test_a_request_that_adds_nothing_is_held_to_its_digest_at_the_tail(backend, extend):
    """Its prefix may have been PENDING at the head, where nothing could be said about it."""
    clock = torch.full((1,), 7, dtype=torch.int64, device=device_of(backend))
    buffers = allocate_buffers(2, clock)
    chain = oracle.ANCHOR
    for slot, token in enumerate((5, 6)):
        record = oracle.Record(token, slot, oracle.COMPLETE, chain)
        buffers.records[slot] = torch.tensor(record.pack())
        chain = (chain + oracle.mix64(token, slot)) & oracle.MASK
    column = {"device": device_of(backend), "dtype": torch.int64}
    batch = RowBatch(
        slot_table=torch.tensor([[0, 1]], **column), page_size=1, rows=torch.tensor([0], **column),
        starts=torch.tensor([0], **column), prefix_lens=torch.tensor([2 - extend], **column),
        extend_lens=torch.tensor([extend], **column), token_starts=torch.tensor([0, extend], **column),
        digests=torch.tensor([layout.signed(chain ^ 1)], **column),
        input_ids=torch.tensor([6] * extend, **column),
        positions=torch.tensor([1] * extend, **column), out_slots=torch.tensor([1] * extend, **column),
    )  # fmt: skip
    verify_rows(backend, buffers, batch, Phase.TAIL)
    assert buffers.counters[layout.lane(Phase.TAIL, Reason.TOKEN)] == 1 - extend
    assert buffers.counters[: layout.NUM_LANES].sum() == 1 - extend


@every_backend
@pytest.mark.parametrize(
    ("known", "compared"), [(3, 1), (2, 1), (1, 1), (4, 0), (0, 0), (-1, 0), (1 << 40, 0), (-(1 << 62), 0)]
)
def test_tokens_are_compared_with_what_the_scheduler_knows(backend, known, compared):
    """Two tokens were cached, one is new; the scheduler knows the first `known`, and one of them differs."""
    device, tokens = device_of(backend), (5, 6, 7)
    column = {"device": device, "dtype": torch.int64}
    buffers = allocate_buffers(3, torch.full((1,), 7, **column))
    for slot, token in enumerate(tokens):
        chain = oracle.digest_of(tokens[:slot])
        buffers.records[slot] = torch.tensor(oracle.Record(token, slot, oracle.COMPLETE, chain).pack())
    for first, differs in ((5, False), (4, True)):
        digest = oracle.digest_of((first, 6, 7)[: max(0, min(known, 3))])
        batch = RowBatch(
            slot_table=torch.tensor([[0, 1, 2]], **column), page_size=1, rows=torch.tensor([0], **column),
            starts=torch.tensor([0], **column), prefix_lens=torch.tensor([2], **column),
            extend_lens=torch.tensor([1], **column), token_starts=torch.tensor([0, 1], **column),
            digests=None, input_ids=torch.tensor([7], **column), positions=torch.tensor([2], **column),
            out_slots=torch.tensor([2], **column), known_lens=torch.tensor([known], **column),
            known_digests=torch.tensor([layout.signed(digest)], **column),
        )  # fmt: skip
        buffers.counters.zero_()
        verify_rows(backend, buffers, batch, Phase.HEAD)
        assert buffers.counters[layout.COUNT_TOKENS_COMPARED] == 0
        verify_rows(backend, buffers, batch, Phase.TAIL)
        assert buffers.counters[layout.COUNT_TOKENS_COMPARED] == compared
        assert buffers.counters[layout.COUNT_TOKENS_LEFT_OUT] == 1 - compared
        found = buffers.counters[layout.lane(Phase.TAIL, Reason.WRITE_TOKEN)]
        assert found == buffers.counters[: layout.NUM_LANES].sum() == (compared and differs)
    if compared:
        row = buffers.violations[layout.lane(Phase.TAIL, Reason.WRITE_TOKEN), 0].tolist()
        actual = layout.signed(oracle.digest_of(tokens[:known]))
        assert row[layout.ROW_SLOT :] == [known - 1, known - 1, 0, 0, layout.signed(digest), actual]


@every_backend
@pytest.mark.parametrize("with_digests", [True, False])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_prefix_that_the_same_forward_writes(backend, with_digests, order):
    """Its end tells no chain yet: without digests, what continues it is live and unverified."""
    column = {"device": device_of(backend), "dtype": torch.int64}
    buffers = allocate_buffers(4, torch.full((1,), 7, **column))
    stale = oracle.Record(99, 1, oracle.COMPLETE, 12345, (3, 4))
    buffers.records[:] = torch.tensor(stale.pack())
    prefix, extend, tokens = (0, 2), (2, 1), ((5, 6), (7,))  # the second continues the first
    digests = [layout.signed(oracle.digest_of((5, 6)[: prefix[r]])) for r in order]
    ids = [token for r in order for token in tokens[r]]
    slots = [slot for r in order for slot in ((0, 1), (2,))[r]]
    batch = RowBatch(
        slot_table=torch.tensor([[0, 1, 3], [0, 1, 2]], **column), page_size=1,
        rows=torch.tensor(order, **column), starts=torch.tensor([0, 0], **column),
        prefix_lens=torch.tensor([prefix[r] for r in order], **column),
        extend_lens=torch.tensor([extend[r] for r in order], **column),
        token_starts=torch.tensor([0, extend[order[0]], 3], **column),
        digests=torch.tensor(digests, **column) if with_digests else None,
        input_ids=torch.tensor(ids, **column),
        positions=torch.tensor([p for r in order for p in range(prefix[r], prefix[r] + extend[r])], **column),
        out_slots=torch.tensor(slots, **column),
    )  # fmt: skip
    write_identities(backend, buffers, batch)
    written = [
        oracle.Record(token, position, oracle.PENDING, oracle.digest_of((5, 6, 7)[:position]), (3, 4)).pack()
        for position, token in enumerate((5, 6, 7))
    ]
    if not with_digests:
        written[2] = oracle.Record(state=oracle.ADOPTED).pack()
    assert buffers.records.tolist() == [*written, stale.pack()]
    complete = plan_fingerprint((), layout.RealData.NONE, torch.device(device_of(backend)))
    complete_slots(backend, buffers, complete, batch.out_slots)
    for phase in (Phase.HEAD, Phase.TAIL):
        verify_rows(backend, buffers, batch, phase)
    assert not buffers.counters[: layout.NUM_LANES].any()


@every_backend
@pytest.mark.parametrize("behind", [63, 64])
def test_what_a_scheduler_knew_long_ago_is_not_compared(backend, behind):
    column = {"device": device_of(backend), "dtype": torch.int64}
    buffers = allocate_buffers(1, torch.full((1,), 7, **column))
    buffers.records[0] = torch.tensor(oracle.Record(5, 0, oracle.COMPLETE, oracle.ANCHOR).pack())
    batch = RowBatch(
        slot_table=torch.zeros(1, 100, **column), page_size=1, rows=torch.tensor([0], **column),
        starts=torch.tensor([1 + behind], **column), prefix_lens=torch.tensor([1 + behind], **column),
        extend_lens=torch.tensor([0], **column), token_starts=torch.tensor([0, 0], **column), digests=None,
        input_ids=torch.tensor([], **column), positions=torch.tensor([], **column),
        out_slots=torch.tensor([], **column), known_lens=torch.tensor([1], **column),
        known_digests=torch.tensor([layout.signed(oracle.digest_of((5,)))], **column),
    )  # fmt: skip
    verify_rows(backend, buffers, batch, Phase.TAIL)
    assert buffers.counters[layout.COUNT_TOKENS_COMPARED] == (behind < layout.KNOWN_LAG)
    assert not buffers.counters[: layout.NUM_LANES].any()


@every_backend
@pytest.mark.parametrize("state", [RecordState.EMPTY, RecordState.ADOPTED, RecordState.AWAITED])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_reset_leaves_the_state_and_spares_other_slots(backend, state, dtype):
    device = device_of(backend)
    buffers = allocate_buffers(600, torch.zeros(1, dtype=torch.int64, device=device))
    before = torch.arange(600 * 4).view(600, 4) - 7
    buffers.records.copy_(before)
    listed = [5, -1, 599, 600, 5, 2**31 - 1, *range(100, 400)]
    slots = torch.tensor([0, *listed, 0], dtype=dtype, device=device)[1:-1]
    reset_slots(backend, buffers, slots, state)
    after = before.tolist()
    for slot in (5, 599, *range(100, 400)):
        after[slot] = oracle.Record(state=int(state)).pack()
    assert buffers.records.tolist() == after
    reset_slots(backend, buffers, slots[:0], state)
    assert buffers.records.tolist() == after
    assert not buffers.counters.any()


@every_backend
def test_only_a_complete_record_is_a_witness(backend):
    """The fingerprints of the others are of no bytes that a forward wrote."""
    scene = random_scene(4)
    slots = [slot for slot in scene.oracle()[1].out_slots if 0 <= slot < len(scene.records)]
    assert len(slots) > 8
    for number, slot in enumerate(slots):
        record = oracle.Record.unpack(scene.records[slot].tolist())
        record.state, record.token = number % 8, record.token ^ 1 << 20
        record.fingerprints = 3 + number, 4 + number
        scene.records[slot] = torch.tensor(record.pack())
    group, batch = scene.oracle()
    buffers = scene.buffers(backend)
    write_identities(backend, buffers, scene.batch_on(backend))
    group.write(batch)
    assert_same(buffers, group)
