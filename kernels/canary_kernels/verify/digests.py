"""Verify in Triton: the chain after one token of a request against a digest of the tokens up to it."""

from __future__ import annotations

import triton
import triton.language as tl

from canary_kernels import layout
from canary_kernels.jit import (
    CHAIN,
    COMPLETE,
    NUM_REASONS,
    RECORD_WORDS,
    continued,
    count,
    flaw_of,
    identity_holds,
    report,
)

TOKEN_REASON = tl.constexpr(int(layout.Reason.TOKEN))
WRITE_TOKEN_REASON = tl.constexpr(int(layout.Reason.WRITE_TOKEN))
COUNT_TOKENS_COMPARED = tl.constexpr(layout.COUNT_TOKENS_COMPARED)
COUNT_TOKENS_LEFT_OUT = tl.constexpr(layout.COUNT_TOKENS_LEFT_OUT)


@triton.jit
def _chain_after(records, num_slots, slot, last):
    """Whether the slot's record is COMPLETE, sound and at position `last`; int64: the chain after it."""
    known = (slot >= 0) & (slot < num_slots)
    identity = tl.load(records + slot * RECORD_WORDS, mask=known, other=0)
    chain = tl.load(records + slot * RECORD_WORDS + CHAIN, mask=known, other=0)
    readable = known & identity_holds(identity, last, COMPLETE) & (flaw_of(identity, chain) == 0)
    return readable, continued(identity, chain, last).to(tl.int64)


@triton.jit
def check_digest(records, num_slots, buffers, slot, last, request, digest, PHASE: tl.constexpr):
    """Compare the chain after one request's last prefix token with the engine's digest."""
    readable, found = _chain_after(records, num_slots, slot, last)
    wrong = readable & (found != digest)
    if wrong:
        report(buffers, wrong, PHASE * NUM_REASONS + TOKEN_REASON, slot, last, request, 0, digest, found)


@triton.jit
def check_known(records, num_slots, buffers, slot, last, request, digest, PHASE: tl.constexpr):
    """Compare the chain after a request's token `last` with the scheduler's; slot -1 = not to be compared."""
    readable, found = _chain_after(records, num_slots, slot, last)
    one = tl.where(readable, 1, 0)
    count(buffers[0], COUNT_TOKENS_COMPARED, one)
    count(buffers[0], COUNT_TOKENS_LEFT_OUT, 1 - one)
    wrong = readable & (found != digest)
    if wrong:
        lane = PHASE * NUM_REASONS + WRITE_TOKEN_REASON
        report(buffers, wrong, lane, slot, last, request, 0, digest, found)
