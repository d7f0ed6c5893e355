"""Write in Triton: a program per chunk. Chunks publish their sums (decoupled look-back), or sum again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from canary_kernels import layout
from canary_kernels.jit import (
    ADOPTED,
    ANCHOR,
    CHAIN,
    COMPLETE,
    FINGERPRINT_K,
    NUM_REASONS,
    PENDING,
    POSITION_MASK,
    RECORD_WORDS,
    STATE_BITS,
    continued,
    count,
    mix64,
    report,
    sealed,
    slot_at,
    state_of,
)
from canary_kernels.launch import columns_of, prepare
from canary_kernels.write.inputs import HEAD, POSITION_REASON, check_inputs, load_new

if TYPE_CHECKING:
    from collections.abc import Callable

    from canary_kernels.buffers import GroupBuffers, RowBatch
    from canary_kernels.launch import Start

COUNT_WRITTEN = tl.constexpr(layout.COUNT_WRITTEN)
COUNT_WRITE_RUNS = tl.constexpr(layout.COUNT_WRITE_RUNS)
LOW_WORD = tl.constexpr((1 << 32) - 1)
TOKEN = tl.constexpr(layout.TOKEN_MASK)
LAUNCH = tl.constexpr(1 << 32)  # what the programs of one launch add to the count of programs

_DECODE_TOKENS = 8  # at most so many per request, drafts included
# (tokens per chunk, tokens summed at once before it, warps): few new tokens per request, or many.
_SHORT, _LONG = (64, 64, 2), (256, 1024, 8)
_PROGRAMS = 8192
# Reads of sums that are not published yet: some 15 us in all, then the chunk sums them itself.
# None on AMD: Triton 3.9 reads volatile words through a cache there that keeps them, 3.6 doesn't compile it.
_ATTEMPTS = 0 if torch.version.hip else 32


@triton.jit
def _stamp(sums):
    """int64 from 1, modulo 2**32: the number of this launch, which is the same for all of its programs."""
    # The shares of a launch make up 2**32 only with this program's own, which it adds at its end.
    return ((tl.load(sums, volatile=True) >> 32) + 1) & LOW_WORD


@triton.jit
def _count_out(sums, request, split, chunks):
    """Add this program's share, and those of its request's programs without a chunk; a launch adds 2**32."""
    splits = tl.num_programs(1).to(tl.int64)
    idle = splits - tl.minimum(tl.maximum(chunks, 1), splits)
    share = tl.where(split == 0, idle + 1, 1)
    rest = LAUNCH - splits * tl.num_programs(0)
    share += tl.where((request == 0) & (split == 0), rest, 0)
    tl.atomic_add(sums, share, mask=(split == 0) | (split < chunks), sem="relaxed")


@triton.jit
def _places_from(sums, number, ROOM: tl.constexpr):
    """int64 pair: where a request's chunks publish their sums, two words each; how many of them can."""
    return sums + (1 + number) * 2, tl.where(number >= 0, ROOM - number, 0)


@triton.jit
def _publish(places, room, chunk, total, stamp):
    """Publish a chunk's sum (int64): two words, each 32 bits of it and the launch's stamp."""
    part = tl.arange(0, 2)
    word = tl.where(part == 0, total & LOW_WORD, (total >> 32) & LOW_WORD) | (stamp << 32)
    # An exchange, not a store: a reader must never see a torn word, and there is no fence to wait for.
    tl.atomic_xchg(places + chunk * 2 + part, word, mask=part < tl.where(chunk < room, 2, 0), sem="relaxed")


@triton.jit
def _look_back(places, room, done, chunk, stamp, ATTEMPTS: tl.constexpr, AT_ONCE: tl.constexpr):
    """int64 pair: sum of chunks done, done + 1, ... as far as published; the first chunk after those."""
    # AT_ONCE is the number of threads: no two hold the same word, so all of them come to one decision.
    lane = tl.arange(0, AT_ONCE)
    words = (lane * 2)[:, None] + tl.arange(0, 2)[None, :]
    passed = done * 0
    left = tl.where(chunk < room, ATTEMPTS, 0)
    while (done < chunk) & (left > 0):
        wanted = (done + lane < chunk)[:, None]
        found = tl.load(places + done * 2 + words, mask=wanted, other=0, volatile=True)
        stale = wanted & (((found >> 32) & LOW_WORD) != stamp)
        low, high = tl.split(tl.sum((found & LOW_WORD) + (stale.to(tl.int64) << 48), axis=0))
        if ((low | high) >> 48) == 0:
            passed += low + (high << 32)
            done = tl.minimum(done + AT_ONCE, chunk)
        else:
            left -= 1
    return passed, done


@triton.jit
def _sum_between(ids, prefix, start, stop, WIDE: tl.constexpr):
    """int64: what the new tokens start, start + 1, ... below stop add to the chain."""
    before = tl.zeros([WIDE], tl.uint64)
    wide_offset = tl.arange(0, WIDE).to(tl.int64)
    for wide in range(start, stop, WIDE):
        earlier = wide + wide_offset
        passing = earlier < stop
        passed = tl.load(ids + earlier, mask=passing, other=0)
        mixed = mix64(passed.to(tl.int32).to(tl.int64), prefix + earlier)
        before += tl.where(passing, mixed, tl.zeros([WIDE], tl.uint64))
    return tl.sum(before.to(tl.int64))


@triton.jit
def _chain_start(records, num_slots, origin, prefix, HAS_DIGESTS: tl.constexpr):
    """int64: the chain at a request's first new position; origin = its digest, or the last prefix slot.

    The anchor where there is no prefix, or no record of that slot.
    """
    known = prefix > 0
    chain = origin
    if not HAS_DIGESTS:
        known = known & (origin >= 0) & (origin < num_slots)
        identity = tl.load(records + origin * RECORD_WORDS, mask=known, other=0)
        chain = tl.load(records + origin * RECORD_WORDS + CHAIN, mask=known, other=0)
        chain = continued(identity, chain, prefix - 1).to(tl.int64)
    return tl.where(known, chain, ANCHOR)


@triton.jit
def _is_written(out_slots, num_tokens, slot, WIDE: tl.constexpr):
    """Whether this forward writes the slot."""
    found = slot * 0
    offset = tl.arange(0, WIDE).to(tl.int64)
    for first in range(0, num_tokens, WIDE):
        mask = first + offset < num_tokens
        written = tl.load(out_slots + first + offset, mask=mask, other=-1).to(tl.int64)
        found += tl.sum(tl.where(mask & (written == slot), 1, 0).to(tl.int64))
    return found > 0


@triton.jit
def _store_block(record, old, token, position, chain, known, adopted):
    """Write PENDING records, or ADOPTED ones where the chain before them is not known.

    The fingerprints of a COMPLETE record of another token stay.
    """
    identity = (token & LOW_WORD) | ((((position & POSITION_MASK) << STATE_BITS) | PENDING) << 32)
    differs = ((old ^ identity) & TOKEN) != 0
    witness = known & differs & (state_of(old) == COMPLETE)
    identity = tl.where(adopted, ADOPTED << 32, identity)
    chain = tl.where(adopted, 0, chain)
    # Pairs of words: half as many stores.
    pair = record[:, None] + tl.arange(0, 2)[None, :]
    tl.store(pair, tl.join(sealed(identity, chain), chain), mask=known[:, None])
    forgotten = tl.where(adopted, known, known & ~witness)
    tl.store(pair + FINGERPRINT_K, tl.join(token * 0, token * 0), mask=forgotten[:, None])


@triton.jit
def _load_request(rows, lengths, request, sizes, real):
    """int64: row, tokens before, new tokens (0 for padding) and the first of these in the forward.

    The last is a request whose numbers cannot be: new tokens are 0 then, so that none is an index.
    sizes = (rows of the table, tokens of a row, tokens of the forward).
    """
    prefix_lens, extend_lens, token_starts = lengths
    num_rows, capacity, num_tokens = sizes
    row = tl.load(rows + request, mask=real, other=-1).to(tl.int64)
    extend = tl.load(extend_lens + request, mask=real, other=0).to(tl.int64)
    prefix = tl.load(prefix_lens + request, mask=real, other=0).to(tl.int64)
    first_token = tl.load(token_starts + request, mask=real, other=0).to(tl.int64)
    live = (row >= 0) & (row < num_rows)
    extend = tl.where(live, extend, 0)
    inside = (prefix >= 0) & (prefix <= capacity) & (extend >= 0) & (extend <= num_tokens)
    inside = inside & ((extend == 0) | ((first_token >= 0) & (first_token <= num_tokens - extend)))
    return row, prefix, tl.where(inside, extend, 0), first_token, live & ~inside


@triton.jit(
    do_not_specialize=[
        "num_slots", "lane_rows", "table_stride", "num_rows", "capacity", "num_requests", "num_tokens",
    ],
    do_not_specialize_on_alignment=[
        "table", "rows", "starts", "prefix_lens", "extend_lens", "token_starts", "digests", "known_lens",
        "known_digests", "input_ids", "positions", "out_slots", "expected_ids",
    ],
)  # fmt: skip
def write_kernel(
    records, counters, violations, clock, num_slots, lane_rows,
    table, table_stride, num_rows, capacity,
    rows, starts, prefix_lens, extend_lens, token_starts, digests, known_lens, known_digests, num_requests,
    input_ids, positions, out_slots, expected_ids, num_tokens, sums,
    PAGE_SIZE: tl.constexpr, HAS_DIGESTS: tl.constexpr, HAS_EXPECTED: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, ROOM: tl.constexpr, ATTEMPTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program (request, split) writes the chunks split, split + splits, ... of the request's new tokens."""
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    buffers = (counters, violations, clock, lane_rows)
    if (request == 0) & (split == 0):
        tl.atomic_add(counters + COUNT_WRITE_RUNS, 1, sem="relaxed")
    # Loaded ahead of the branches: one wait, not one after another.
    real = request < num_requests
    lengths = (prefix_lens, extend_lens, token_starts)
    sizes = (num_rows, capacity, num_tokens)
    row, prefix, extend, first_token, bad = _load_request(rows, lengths, request, sizes, real)
    if bad & (split == 0):
        lane = HEAD * NUM_REASONS + POSITION_REASON
        none = request * 0 - 1
        report(buffers, bad, lane, none, none, request, 0, none + 1 + capacity, prefix)
    if HAS_DIGESTS:
        origin = tl.load(digests + request, mask=real, other=0).to(tl.int64)
    if ATTEMPTS > 0:
        stamp = _stamp(sums)
        # Tokens of requests don't overlap: neither do the places of their chunks.
        places, room = _places_from(sums, first_token // BLOCK + request, ROOM)
    if split * BLOCK < extend:
        if not HAS_DIGESTS:
            last, inside = prefix - 1, (prefix > 0) & (prefix <= capacity)
            origin = slot_at(table, table_stride, row, last, PAGE_SIZE, inside)
            # Its record may be read before or after another program writes it.
            inside = inside & (origin >= 0) & (origin < num_slots)
            adopted = inside & _is_written(out_slots, num_tokens, origin, WIDE)
        else:
            adopted = request < 0
        passed, summed, written = split * 0, split * 0, 0
        for first in range(split * BLOCK, extend, tl.num_programs(1) * BLOCK):
            index = first + tl.arange(0, BLOCK)
            mask = index < extend
            token, slot, given, wanted = load_new(
                input_ids, out_slots, positions, expected_ids, first_token + index, mask, HAS_EXPECTED
            )
            position = prefix + index
            mixed = tl.where(mask, mix64(token, position), tl.zeros([BLOCK], tl.uint64)).to(tl.int64)
            if ATTEMPTS > 0:
                _publish(places, room, first // BLOCK, tl.sum(mixed), stamp)
            # The rest of what must be read and checked, while the sums are under way.
            known = mask & (slot >= 0) & (slot < num_slots)
            record = records + slot * RECORD_WORDS
            old = tl.load(record, mask=known, other=0)
            written += tl.sum(known.to(tl.int32))
            chain = tl.cumsum(mixed) - mixed
            check_inputs(buffers, slot, position, given, token, wanted, request, mask, HAS_EXPECTED)
            if first == split * BLOCK:
                passed += _chain_start(records, num_slots, origin, prefix, HAS_DIGESTS)
            if ATTEMPTS > 0:
                gathered, chunk = _look_back(
                    places, room, summed // BLOCK, first // BLOCK, stamp, ATTEMPTS, AT_ONCE
                )
                passed += gathered
                summed = chunk * BLOCK
            if summed < first:
                passed += _sum_between(input_ids + first_token, prefix, summed, first, WIDE)
                summed = first
            _store_block(record, old, token, position, chain + passed, known, adopted)
        count(counters, COUNT_WRITTEN, written)
    if ATTEMPTS > 0:
        _count_out(sums, request, split, tl.cdiv(extend, BLOCK))


def write_identities(buffers: GroupBuffers, batch: RowBatch) -> Callable[[], None] | None:
    """Launch the write, see `op.write_identities`; returns what does it again. None = it was compiled."""
    columns = columns_of(batch)
    requests, tokens = batch.rows.shape[0], batch.input_ids.shape[0]
    shape = _LONG if tokens > _DECODE_TOKENS * requests else _SHORT
    # Any one request may hold all tokens: lengths are known on the device only.
    grid = max(1, requests), max(1, min(_PROGRAMS // max(1, requests), -(-tokens // shape[0])))
    key = "write_kernel", shape, columns.kind
    start: Start | None = buffers.cache.get(key)
    if start is not None:
        launch = start.again(grid, columns.addresses)
        launch()
        return launch
    block, wide, warps = shape
    sums = buffers.sums if shape is _LONG and _ATTEMPTS > 0 else None
    constants = {
        "sums": sums, "PAGE_SIZE": batch.page_size, "HAS_DIGESTS": batch.digests is not None,
        "HAS_EXPECTED": batch.expected_ids is not None, "BLOCK": block, "WIDE": wide,
        "ATTEMPTS": 0 if sums is None else _ATTEMPTS, "AT_ONCE": 32 * warps,
        "ROOM": 0 if sums is None else sums.shape[0] - 1,
    }  # fmt: skip
    given = columns.tensors
    buffers.cache[key] = prepare(write_kernel, buffers, grid, given, {**constants, "num_warps": warps})
    return None
