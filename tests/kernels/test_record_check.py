"""A record's check of itself: known values, and all of its 256 bits, one after another, in every state."""

from __future__ import annotations

import pytest
import torch

from canary_kernels import layout
from canary_kernels.buffers import GroupBuffers, RowBatch, allocate_buffers
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import FingerprintPlan, compare_slots, hash_slots, plan_fingerprint
from canary_kernels.layout import Phase, RealData, Reason, RecordState, Unverified, signed
from canary_kernels.verify import verify_list, verify_rows
from canary_kernels.write import reset_slots, write_identities
from tests.kernels import pools
from tests.kernels.scenes import device_of
from tests.oracles import records as oracle
from tests.sizes import sized

every_backend = pytest.mark.parametrize("backend", list(Backend))
# (token, position, state, chain) -> IDENTITY; worked out by hand, see docs/architecture.md.
KNOWN = [
    ((0, 0, RecordState.EMPTY, 0), 0x0000000000000000),
    ((0, 0, RecordState.ADOPTED, 0), 0xC000000300000000),
    ((0, 0, RecordState.BASELINE, 0), 0x0800000400000000),
    ((5, 0, RecordState.COMPLETE, 0x243F6A8885A308D3), 0x3000000200000005),
    ((128000, 131071, RecordState.PENDING, 0x6D8EB1ACA6E03A0B), 0x380FFFF90001F400),
    ((-1, layout.MAX_POSITION, RecordState.COMPLETE, 1), 0x57FFFFFAFFFFFFFF),
]
POSITION = 3


@pytest.mark.parametrize(("fields", "identity"), KNOWN)
def test_known_values(fields: tuple[int, int, RecordState, int], identity: int) -> None:
    token, position, state, chain = fields
    assert layout.identity_of(token, position, state, chain) == signed(identity)
    assert oracle.Record(token, position, int(state), chain).pack()[0] == signed(identity)


@every_backend
def test_known_values_are_written(backend: Backend) -> None:
    """A PENDING record of a token with a chain of its engine's, and reset records."""
    device = device_of(backend)
    buffers = allocate_buffers(4, torch.zeros(1, dtype=torch.int64, device=device))

    def column(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    batch = RowBatch(
        slot_table=column(0)[None], page_size=1 << 17, rows=column(0), starts=column(131071),
        prefix_lens=column(131071), extend_lens=column(1), token_starts=column(0, 1),
        digests=column(0x6D8EB1ACA6E03A0B), input_ids=column(128000), positions=column(131071),
        out_slots=column(2),
    )  # fmt: skip
    write_identities(backend, buffers, batch)
    assert buffers.records[2, 0] == signed(0x380FFFF90001F400)
    reset_slots(backend, buffers, column(1), RecordState.ADOPTED)
    assert buffers.records[1, 0] == signed(0xC000000300000000)


# Fingerprints of all slots in the interpreter take up to 10 s.
_SLOW = [(Backend.TRITON, state) for state in RecordState if state is not RecordState.EMPTY]


@pytest.mark.parametrize(
    ("backend", "state"),
    [
        pytest.param(backend, state, marks=[pytest.mark.slow] if (backend, state) in _SLOW else [])
        for backend in Backend
        for state in RecordState
    ],
)
def test_every_bit_of_a_record_is_checked_or_harmless(backend: Backend, state: RecordState) -> None:
    """Flipping any one of 256 bits is reported by a check that reads the record, or changes no verdict.

    Identity and chain: RECORD, wherever the record is read. Fingerprints: KV_DATA where they are compared;
    where they are not (no fingerprint was taken), nothing depends on them.
    """
    device = device_of(backend)
    plan = plan_fingerprint(pools.separate(device).sources, RealData.ALL, device)
    slots = torch.arange(pools.SLOTS, device=device)
    own = hash_slots(backend, plan, slots).tolist()
    history = state in (RecordState.PENDING, RecordState.COMPLETE)
    compared = state in (RecordState.COMPLETE, RecordState.BASELINE)
    record = oracle.Record(*(11, POSITION, int(state), 99) if history else (0, 0, int(state), 0))
    whole = [[*record.pack()[:2], *(hashes if compared else (0, 0))] for hashes in own]
    undamaged = _found(backend, plan, whole)[0]
    assert undamaged <= {Reason.UNWRITTEN}  # EMPTY, and PENDING once its forward is over
    step = sized(1, 2) if backend is Backend.TRITON else 1  # every half of a word, or one of each
    for first in range(0, 256, step * pools.SLOTS):
        damaged = [list(words) for words in whole]
        for slot, words in enumerate(damaged):
            word, bit = divmod(first + slot, 64)
            words[word] = signed(words[word] ^ 1 << bit)
        if first // 64 < layout.FINGERPRINT_K:
            expected = {Reason.RECORD}
        else:
            expected = {Reason.KV_DATA} if compared else undamaged
        assert _found(backend, plan, damaged) == [expected] * pools.SLOTS, first


def _found(backend: Backend, plan: FingerprintPlan, records: list[list[int]]) -> list[set[Reason]]:
    """By slot: what a sweep reports. Patrol, reuse and hit report the same without UNWRITTEN."""
    device = device_of(backend)
    listed = torch.arange(pools.SLOTS, device=device)
    found: dict[Phase, list[set[Reason]]] = {}
    for phase in (Phase.SWEEP, Phase.PATROL, Phase.HEAD, Phase.HIT):
        buffers = allocate_buffers(pools.SLOTS, torch.ones(1, dtype=torch.int64, device=device), 64)
        buffers.records.copy_(torch.tensor(records))
        if phase is Phase.SWEEP:
            verify_list(backend, buffers, listed, listed * 0 + POSITION, listed * 0 - 1, phase)
        compare_slots(backend, buffers, plan, listed, phase)
        assert _reasons(buffers, phase) == {
            Reason(index % layout.NUM_REASONS)
            for index in range(layout.NUM_LANES)
            if buffers.counters[layout.COUNT_VIOLATIONS + index]
        }
        found[phase] = [set() for _ in listed]
        for reason in Reason:
            for row in buffers.violations[layout.lane(phase, reason)].tolist():
                if row[layout.ROW_EVENT]:
                    found[phase][row[layout.ROW_SLOT]].add(reason)
    assert found[Phase.PATROL] == found[Phase.HEAD] == found[Phase.HIT]
    assert found[Phase.PATROL] == [reasons - {Reason.UNWRITTEN} for reasons in found[Phase.SWEEP]]
    return found[Phase.SWEEP]


def _reasons(buffers: GroupBuffers, phase: Phase) -> set[Reason]:
    return {reason for reason in Reason if buffers.counters[layout.lane(phase, reason)]}


@every_backend
@pytest.mark.parametrize("bit", [3, 59, 63])  # of the token, and of the check itself
@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_record_is_reported_once_and_links_nothing(
    backend: Backend, damaged: int, bit: int
) -> None:
    """No CHAIN follows from a record whose check does not hold; HEAD and TAIL report it in the rows."""
    device = device_of(backend)
    chain, packed = oracle.ANCHOR, []
    for position, token in enumerate((5, 6, 7)):
        packed.append(oracle.Record(token, position, oracle.COMPLETE, chain).pack())
        chain = (chain + oracle.mix64(token, position)) & oracle.MASK
    packed[damaged][0] = signed(packed[damaged][0] ^ 1 << bit)
    column = {"device": device, "dtype": torch.int64}
    batch = RowBatch(
        slot_table=torch.tensor([[0, 1, 2]], **column), page_size=1, rows=torch.tensor([0], **column),
        starts=torch.tensor([0], **column), prefix_lens=torch.tensor([3], **column),
        extend_lens=torch.tensor([0], **column), token_starts=torch.tensor([0, 0], **column),
        digests=torch.tensor([signed(chain)], **column), input_ids=torch.tensor([], **column),
        positions=torch.tensor([], **column), out_slots=torch.tensor([], **column),
    )  # fmt: skip
    for phase in (Phase.HEAD, Phase.TAIL):
        buffers = allocate_buffers(3, torch.ones(1, **column))
        buffers.records.copy_(torch.tensor(packed))
        verify_rows(backend, buffers, batch, phase)
        assert _reasons(buffers, phase) == {Reason.RECORD}
        assert buffers.counters[layout.lane(phase, Reason.RECORD)] == 1
        assert buffers.counters[layout.COUNT_VERIFIED + phase] == 2
        row = buffers.violations[layout.lane(phase, Reason.RECORD), 0].tolist()
        assert row[layout.ROW_SLOT :] == [damaged, damaged, 0, 0, 0, 1 << bit % 5]


# (phase of the check, state) -> reason, or why it is not verified; COMPLETE records are.
OF_STATE: dict[tuple[bool, RecordState], Reason | Unverified] = {
    (True, RecordState.EMPTY): Reason.UNWRITTEN,
    (False, RecordState.EMPTY): Reason.UNWRITTEN,
    (True, RecordState.PENDING): Unverified.PENDING,  # this very forward writes it
    (False, RecordState.PENDING): Reason.UNWRITTEN,
    (True, RecordState.AWAITED): Unverified.PENDING,  # or brings its bytes
    (False, RecordState.AWAITED): Unverified.ADOPTED,
    (True, RecordState.ADOPTED): Unverified.ADOPTED,
    (False, RecordState.ADOPTED): Unverified.ADOPTED,
    (True, RecordState.BASELINE): Unverified.BASELINE,
    (False, RecordState.BASELINE): Unverified.BASELINE,
}


@every_backend
@pytest.mark.parametrize("phase", [Phase.HEAD, Phase.TAIL, Phase.SWEEP])
def test_what_each_state_means_in_each_phase(backend: Backend, phase: Phase) -> None:
    device = device_of(backend)
    for state in set(RecordState) - {RecordState.COMPLETE}:
        buffers = allocate_buffers(2, torch.ones(1, dtype=torch.int64, device=device))
        token = oracle.Record(11, POSITION, int(state), 99) if state is RecordState.PENDING else None
        record = token or oracle.Record(0, 0, int(state), 0)
        buffers.records[1] = torch.tensor(record.pack())
        slot = torch.ones(1, dtype=torch.int64, device=device)
        verify_list(backend, buffers, slot, slot * POSITION, slot * 0 - 1, phase)
        expected = OF_STATE[phase is Phase.HEAD, state]
        assert _reasons(buffers, phase) == ({expected} if isinstance(expected, Reason) else set()), state
        first = layout.COUNT_UNVERIFIED + phase * layout.NUM_UNVERIFIED
        causes = {cause for cause in Unverified if buffers.counters[first + cause]}
        assert causes == ({expected} if isinstance(expected, Unverified) else set()), state
        assert buffers.counters[layout.COUNT_VERIFIED + phase] == 0
