"""Write compiled for the CPU: what the old records say is read before any of them is replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from canary_kernels import layout
from canary_kernels.frames import (
    DIGESTS,
    EXPECTED_IDS,
    EXTEND_LENS,
    HAS_DIGESTS,
    HAS_EXPECTED,
    INPUT_IDS,
    NUM_REQUESTS,
    NUM_ROWS,
    NUM_TOKENS,
    OUT_SLOTS,
    PAGE_SIZE,
    POSITIONS,
    PREFIX_LENS,
    ROWS,
    TOKEN_STARTS,
    WIDTH,
    frame_of_batch,
    frame_of_buffers,
)
from canary_kernels.layout import Part, Phase, Reason, RecordState
from canary_kernels.native import kernel, load_int64, piece, store_int64
from canary_kernels.native_records import (
    ANCHOR,
    added,
    column,
    continued,
    count,
    mix64,
    record_at,
    report,
    sealed,
    slot_at,
    state_of,
    token_of,
)

if TYPE_CHECKING:
    from canary_kernels.buffers import GroupBuffers, RowBatch

_PENDING, _COMPLETE = int(RecordState.PENDING), int(RecordState.COMPLETE)
_IDENTITY_PART = int(Part.IDENTITY)
_WRONG_POSITION = layout.lane(Phase.HEAD, Reason.WRITE_POSITION)
_WRONG_TOKEN = layout.lane(Phase.HEAD, Reason.WRITE_TOKEN)
_COUNT_WRITTEN, _COUNT_WRITE_RUNS = layout.COUNT_WRITTEN, layout.COUNT_WRITE_RUNS
_IDENTITY, _CHAIN = layout.IDENTITY, layout.CHAIN
_FINGERPRINT_K, _FINGERPRINT_V = layout.FINGERPRINT_K, layout.FINGERPRINT_V
_STATE_BITS = layout.STATE_BITS
_LOW_WORD, _MAX_POSITION = (1 << 32) - 1, layout.MAX_POSITION
_TOKEN = layout.TOKEN_MASK
_IDENTITY_ADOPTED = layout.identity_of(0, 0, RecordState.ADOPTED)


@piece
def _live(batch, request):
    """Whether a request is none of the padding."""
    row = column(batch, ROWS, request)
    return 0 <= row < load_int64(batch, NUM_ROWS)


@piece
def _capacity(batch):
    """Tokens of a row of the table."""
    return load_int64(batch, WIDTH) * load_int64(batch, PAGE_SIZE)


@piece
def _is_inside(batch, request):
    """Whether a request's lengths lie within the table and the forward."""
    prefix, extend = column(batch, PREFIX_LENS, request), column(batch, EXTEND_LENS, request)
    first, tokens = column(batch, TOKEN_STARTS, request), load_int64(batch, NUM_TOKENS)
    if not (0 <= prefix <= _capacity(batch) and 0 <= extend <= tokens):
        return False
    return extend == 0 or 0 <= first <= tokens - extend


@piece
def _new_tokens(batch, request):
    """How many tokens a request adds; 0 for padding, and where its lengths cannot be."""
    if _live(batch, request) and _is_inside(batch, request):
        return column(batch, EXTEND_LENS, request)
    return np.int64(0)


@piece
def _is_linked(buffers, batch, request, prefix):
    """Whether the chain before a request's new tokens is known: without digests not while it is written."""
    last = prefix - 1
    if prefix <= 0 or load_int64(batch, HAS_DIGESTS) or last >= _capacity(batch):
        return True
    origin = slot_at(batch, column(batch, ROWS, request), last)
    if not record_at(buffers, origin):
        return True
    for token in range(load_int64(batch, NUM_TOKENS)):  # noqa: SIM110 - numba compiles no generators
        if column(batch, OUT_SLOTS, token) == origin:
            return False
    return True


@piece
def _chain_start(buffers, batch, request, prefix):
    """The chain at a request's first new position; the anchor after a slot that has no record."""
    if prefix <= 0:
        return ANCHOR
    if load_int64(batch, HAS_DIGESTS):
        return column(batch, DIGESTS, request)
    last = prefix - 1
    if last >= load_int64(batch, WIDTH) * load_int64(batch, PAGE_SIZE):
        return ANCHOR
    record = record_at(buffers, slot_at(batch, column(batch, ROWS, request), last))
    return continued(record, last) if record else ANCHOR


@piece
def _check_inputs(buffers, batch, token, place):
    """Compare the model's inputs with the positions that continue the chain and the oracle's tokens."""
    _, position, _ = place
    given = column(batch, POSITIONS, token)
    if given != position:
        report(buffers, _WRONG_POSITION, place, _IDENTITY_PART, position, given)
    if load_int64(batch, HAS_EXPECTED):
        wanted, found = column(batch, EXPECTED_IDS, token), token_of(column(batch, INPUT_IDS, token))
        if wanted >= 0 and wanted != found:
            report(buffers, _WRONG_TOKEN, place, _IDENTITY_PART, wanted, found)


@piece
def _prepare(buffers, batch, request, staged, first):
    """Stage one request's records (int64 [n, 5]: address, then the words) from row `first`; returns the next.

    A record that replaces a COMPLETE one of another token keeps the old fingerprints.
    """
    prefix = column(batch, PREFIX_LENS, request)
    token = column(batch, TOKEN_STARTS, request)
    chain, linked = _chain_start(buffers, batch, request, prefix), _is_linked(buffers, batch, request, prefix)
    for number in range(_new_tokens(batch, request)):
        position = prefix + number
        slot = column(batch, OUT_SLOTS, token + number)
        _check_inputs(buffers, batch, token + number, (slot, position, request))
        identifier = token_of(column(batch, INPUT_IDS, token + number))
        record = record_at(buffers, slot)
        if record:
            identity = ((position & _MAX_POSITION) << _STATE_BITS | _PENDING) << 32 | identifier & _LOW_WORD
            old = load_int64(record, _IDENTITY)
            # An equal token may rightly leave equal bytes, elsewhere too (ALiBi, no rotation): no witness.
            witness = linked and (old ^ identity) & _TOKEN != 0 and state_of(old) == _COMPLETE
            if linked:
                staged[first, 1], staged[first, 2] = sealed(identity, chain), chain
            else:
                staged[first, 1], staged[first, 2] = _IDENTITY_ADOPTED, 0
            staged[first, 0] = record
            staged[first, 3] = load_int64(record, _FINGERPRINT_K) if witness else 0
            staged[first, 4] = load_int64(record, _FINGERPRINT_V) if witness else 0
            first += 1
        chain = added(chain, mix64(identifier, position))
    return first


@kernel("void(int64, int64)")
def _write_identities(buffers, batch):
    total = 0
    for request in range(load_int64(batch, NUM_REQUESTS)):
        total += _new_tokens(batch, request)
        if _live(batch, request) and not _is_inside(batch, request):
            prefix = column(batch, PREFIX_LENS, request)
            report(buffers, _WRONG_POSITION, (-1, -1, request), _IDENTITY_PART, _capacity(batch), prefix)
    staged = np.empty((total, 5), dtype=np.int64)
    written = 0
    for request in range(load_int64(batch, NUM_REQUESTS)):
        if _new_tokens(batch, request):
            written = _prepare(buffers, batch, request, staged, written)
    for number in range(written):
        record = staged[number, 0]
        store_int64(record, _IDENTITY, staged[number, 1])
        store_int64(record, _CHAIN, staged[number, 2])
        store_int64(record, _FINGERPRINT_K, staged[number, 3])
        store_int64(record, _FINGERPRINT_V, staged[number, 4])
    count(buffers, _COUNT_WRITTEN, written)
    count(buffers, _COUNT_WRITE_RUNS, 1)


def write_identities(buffers: GroupBuffers, batch: RowBatch) -> None:
    """Write PENDING records of the new tokens and check the forward's inputs."""
    _write_identities(frame_of_buffers(buffers), frame_of_batch(batch))
